"""One answer to a name that does not exist, for datasets and models alike."""

import difflib
from collections.abc import Sequence


def unknown_name(kind: str, name: str, valid: Sequence[str]) -> ValueError:
    """Return the error for a wrong ``name``: one line with the valid names and the nearest of them.

    >>> unknown_name("dataset", "digit", ("digits", "mnist"))
    ValueError("unknown dataset 'digit'; valid: digits, mnist. Did you mean 'digits'?")
    """
    nearest = difflib.get_close_matches(name.lower(), valid, n=1)
    question = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"unknown {kind} {name!r}; valid: {', '.join(valid)}.{question}")
