"""Import torchvision even when a CPU build of torch stands beside PyPI's torchvision.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its C++ extension does not load;
it passes over that in silence, and then the import dies: `operator torchvision::nms does not
exist`. Nothing that this course uses calls those operators; they only have to be declared. Every
torchvision import in distlab goes through `import_torchvision`.
"""

import importlib
from types import ModuleType

import torch

# What `import torchvision` attaches Python code to without asking if its extension has loaded:
# only nms up to torchvision 0.26, qnms as well in 0.28.
_DETECTION_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_SCHEMAS = {"nms": _DETECTION_BOXES, "qnms": _DETECTION_BOXES}


def import_torchvision() -> ModuleType:
    """Import torchvision, declaring the operators it lacks if, and only if, that is why it fails.

    On a healthy install this is a plain import. After a repair models, datasets and transforms
    work; calling a declared operator (`torchvision.ops.nms`) still fails, as it has no kernel.

    Returns: the module torchvision, the same one at every call.
    Raises: ImportError, RuntimeError: what torchvision raised, if that is not the cause.
    Cost: about 1.4 s for the first import, 3 ms of it for the attempt that fails.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        missing = [op for op in _SCHEMAS if not hasattr(torch.ops.torchvision, op)]
        if "torchvision::" not in str(error) or not missing:
            raise
    for op in missing:
        # Without its `lib` argument, define() keeps the declaration until the process ends.
        torch.library.define(f"torchvision::{op}", _SCHEMAS[op])
    return importlib.import_module("torchvision")
