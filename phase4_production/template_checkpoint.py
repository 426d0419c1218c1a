"""Checkpoints: what a run leaves behind, so that another can go on from it.

Tasks 4.1 to 4.4. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 4.1``.
"""


# anchor 4.1
# end 4.1


# anchor 4.2
# end 4.2


# anchor 4.3
# end 4.3


# anchor 4.4
# end 4.4
