"""Unpickle what somebody else's program has sent, without running anything of theirs.

Pickles are programs: one can import modules and call what is in them. Here only numbers, strings,
bytes, None and lists, tuples, sets and dicts of them come out.
"""

import io
import pickle

WANTED = "which is no plain data: numbers, strings, and lists, tuples and dicts of them are"


class NotPlainError(ValueError):
    """Something else than plain data was sent; the message names it."""


def loads(data: bytes) -> object:
    """Unpickle plain data.

    Raises:
        NotPlainError: there is something else in it, or it is no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except NotPlainError:
        raise
    except Exception as error:  # what a broken pickle raises can be anything
        raise NotPlainError(f"what cannot be read ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, name: str) -> object:
        """Refuse every name: even an innocent class can be changed by what follows in a pickle."""
        raise NotPlainError(f"{module_name}.{name}")
