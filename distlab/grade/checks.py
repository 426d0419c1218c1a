"""What a test of a suite says when a submission is wrong."""


class Wrong(AssertionError):
    """The submission does not do what the task asks; the message is for the learner."""


def check(condition: object, message: str) -> None:
    """Raise ``Wrong(message)`` unless ``condition`` holds.

    The message says what was expected, what came, on which rank, and the likely cause. The plugin
    puts the task in front of it, and the section of the guidelines after it.
    """
    if not condition:
        raise Wrong(message)
