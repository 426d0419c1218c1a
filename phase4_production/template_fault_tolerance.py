"""Fault tolerance: notice that a rank is gone, and go on without it.

Tasks 4.5 to 4.8. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 4.5``.
"""


# anchor 4.5
# end 4.5


# anchor 4.6
# end 4.6


# anchor 4.7
# end 4.7


# anchor 4.8
# end 4.8
