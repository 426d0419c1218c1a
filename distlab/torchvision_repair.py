"""Import torchvision even if a CPU build of torch is installed with PyPI's torchvision.

PyPI's torchvision is built for CUDA. With a CPU build of torch, its C++ extension does not load.
torchvision silently ignores that, and then its import fails: `operator torchvision::nms does not
exist`. The course never calls these operators, so it is enough to declare them. Every torchvision
import in distlab uses `import_torchvision`; the simulator repairs those of programs.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

# Operators to which `import torchvision` attaches Python code even if its extension is not loaded:
# only nms up to torchvision 0.26, nms and qnms in 0.28.
_DETECTION_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_SCHEMAS = {"nms": _DETECTION_BOXES, "qnms": _DETECTION_BOXES}


class _Repairer(MetaPathFinder):
    """Declares the operators once torchvision has looked for its extension, and finds nothing."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        """Declare what is missing, just before the import of the part that needs it."""
        if fullname == "torchvision._meta_registrations":
            for op in [op for op in _SCHEMAS if not hasattr(torch.ops.torchvision, op)]:
                # Without a `lib` argument, define() keeps the declaration until the process ends.
                torch.library.define(f"torchvision::{op}", _SCHEMAS[op])


@contextlib.contextmanager
def repairing() -> Iterator[None]:
    """Let imports of torchvision in this block succeed if only its operators are missing.

    On a sound installation, this changes nothing. After a repair, models, datasets and transforms
    work; calling a declared operator (`torchvision.ops.nms`) still fails, as it has no kernel.
    """
    repairer = _Repairer()
    sys.meta_path.insert(0, repairer)
    try:
        yield
    finally:
        sys.meta_path.remove(repairer)


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring its operators if their absence would make the import fail.

    Returns: the module torchvision.
    Raises: ImportError, RuntimeError: The import failed for another reason.
    Cost: about 1.4 s for the first import.
    """
    with repairing():
        return importlib.import_module("torchvision")
