"""torch's ``ZeroRedundancyOptimizer``, imported without the warning that torch itself causes."""

import warnings

__all__ = ["ZeroRedundancyOptimizer"]

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer
