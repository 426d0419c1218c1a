"""``torch.compile`` on simulated ranks: the code runs as it is, and so computes the same values.

torch's compiler would trace the simulator, too, and its time would count as the rank's.
"""

import warnings
from functools import partial
from typing import Any

from torch import nn

from distlab.sim.reporting.sites import Places

_NOTE = (
    "torch.compile: simulated ranks run this code as it is. The values are the same, but nothing "
    "is fused, so it takes as long as without torch.compile"
)


class Compiler:
    """Stands in for ``torch.compile``; says once in a world that it compiles nothing."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._has_spoken = False

    def __call__(self, model: Any = None, *, disable: bool = False, **_: Any) -> Any:
        """Return a module in torch's wrapper, whose state has ``_orig_mod.``, or a function itself.

        Args:
            model: Module or function; None to get a decorator.
            disable: True to return a module as it is.
        """
        if model is None:
            return partial(self, disable=disable)
        if not disable:
            self._speak()
        return _wrapped(model) if isinstance(model, nn.Module) and not disable else model

    def _speak(self) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            file, line, _ = self._places.call_site()[0]
            warnings.warn_explicit(_NOTE, UserWarning, file or "distlab", line)


def _wrapped(module: nn.Module) -> nn.Module:
    from torch._dynamo.eval_frame import DisableContext, OptimizedModule  # takes seconds

    return OptimizedModule(module, DisableContext())
