"""Unpickle what somebody else's program has sent, without running anything of theirs.

Pickles are programs: one can import modules and call what is in them. Here only numbers, strings
and containers of them come out, and instances of classes that the caller names.
"""

import io
import pickle
from collections.abc import Callable

WANTED = "which is no plain data: numbers, strings, and lists, tuples and dicts of them are"


class NotPlainError(ValueError):
    """Something else than plain data was sent; the message names it."""


def loads(data: bytes, allows: Callable[[type], bool] = lambda _: False) -> object:
    """Unpickle plain data.

    Args:
        data: the pickle.
        allows: tells whether instances of a class may come too.

    Raises:
        NotPlainError: there is something else in it, or it is no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data), allows).load()
    except NotPlainError:
        raise
    except Exception as error:  # what a broken pickle raises can be anything
        raise NotPlainError(f"what cannot be read ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allows: Callable[[type], bool]) -> None:
        super().__init__(file)
        self._allows = allows

    def find_class(self, module_name: str, name: str) -> type:
        """Return a class that is allowed; only modules of distlab are imported for it."""
        if module_name.partition(".")[0] == "distlab" and "." not in name:
            found = super().find_class(module_name, name)
            if isinstance(found, type) and found.__module__ == module_name and self._allows(found):
                return found
        raise NotPlainError(f"{module_name}.{name}")
