"""Gradient compression: fewer bytes on the wire, and still convergence.

Tasks 4.9 to 4.13. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 4.9``.
"""


# anchor 4.9
# end 4.9


# anchor 4.10
# end 4.10


# anchor 4.11
# end 4.11


# anchor 4.12
# end 4.12


# anchor 4.13
# end 4.13
