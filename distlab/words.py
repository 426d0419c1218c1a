"""Words of the messages that people read."""


def counted(number: int, noun: str) -> str:
    """Write ``1 rank``, ``2 ranks`` or ``1,024 ranks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
