"""Import torchvision even if a CPU build of torch is installed with PyPI's torchvision.

PyPI's torchvision is built for CUDA. With a CPU build of torch, its C++ extension does not load.
torchvision silently ignores that, and then its import fails: `operator torchvision::nms does not
exist`. The course never calls these operators, so it is enough to declare them. Every torchvision
import in distlab uses `import_torchvision`.
"""

import importlib
from types import ModuleType

import torch

# Operators to which `import torchvision` attaches Python code even if its extension is not loaded:
# only nms up to torchvision 0.26, nms and qnms in 0.28.
_DETECTION_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_SCHEMAS = {"nms": _DETECTION_BOXES, "qnms": _DETECTION_BOXES}


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring its operators first if their absence makes the import fail.

    On a sound installation, this is a plain import. After a repair, models, datasets and transforms
    work; calling a declared operator (`torchvision.ops.nms`) still fails, as it has no kernel.

    Returns: the module torchvision.
    Raises: ImportError, RuntimeError: The import failed for another reason.
    Cost: about 1.4 s for the first import, including 3 ms for the failed attempt.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        missing = [op for op in _SCHEMAS if not hasattr(torch.ops.torchvision, op)]
        if "torchvision::" not in str(error) or not missing:
            raise
    for op in missing:
        # Without a `lib` argument, define() keeps the declaration until the process ends.
        torch.library.define(f"torchvision::{op}", _SCHEMAS[op])
    return importlib.import_module("torchvision")
