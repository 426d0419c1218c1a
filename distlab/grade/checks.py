"""The errors by which a suite's test reports a wrong submission."""


class Wrong(AssertionError):
    """The submission does not do what the task asks; the message is for the learner."""


class WrongResult(TypeError):
    """A learner's function returned something else than the task asks for; raised by bodies.

    The verdict is its message, with the rank if there are several, without a traceback: none of
    the lines in it would be the learner's.
    """

    def __init__(self, message: str) -> None:
        """Join the lines of the message, because tensors print on several."""
        super().__init__(" ".join(message.split()))


def check(condition: object, message: str) -> None:
    """Raise ``Wrong(message)`` unless ``condition`` holds.

    The message has the expected and the actual value, the rank, and the likely cause. The plugin
    prepends the task and appends the section of the guidelines.
    """
    if not condition:
        raise Wrong(message)
