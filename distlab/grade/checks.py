"""What a test of a suite says when a submission is wrong."""


class Wrong(AssertionError):
    """The submission does not do what the task asks; the message is for the learner."""


class WrongResult(TypeError):
    """A learner's function returned what the task does not ask for; raised by bodies.

    The verdict is its message, with the rank where there are several, and no traceback: none of
    the lines that lead to it is the learner's.
    """

    def __init__(self, message: str) -> None:
        """Note the message on one line, as tensors are written on several."""
        super().__init__(" ".join(message.split()))


def check(condition: object, message: str) -> None:
    """Raise ``Wrong(message)`` unless ``condition`` holds.

    The message says what was expected, what came, on which rank, and the likely cause. The plugin
    puts the task in front of it, and the section of the guidelines after it.
    """
    if not condition:
        raise Wrong(message)
