"""The errors that a suite raises to report a wrong submission."""


class Wrong(AssertionError):
    """The submission does not do what the task asks; the message is for the learner."""


class WrongResult(TypeError):
    """A learner's function returned something other than what its task asks for.

    Bodies raise this. The verdict shows the message, with the rank if there are several, but no
    traceback, because none of the lines in it would be the learner's.
    """

    def __init__(self, message: str) -> None:
        """Join the lines of the message, because tensors print on several lines."""
        super().__init__(" ".join(message.split()))


def check(condition: object, message: str) -> None:
    """Raise ``Wrong(message)`` unless ``condition`` holds.

    The message gives the expected and the actual value, the rank, and the likely cause. The plugin
    prepends the task and appends the section of the guidelines.
    """
    if not condition:
        raise Wrong(message)
