"""Shows the ranks' GPUs to the program while a world runs."""

import contextlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from distlab.sim.gpu import (
    autocast,
    backend,
    batchnorm,
    composites,
    cuda,
    loading,
    one_process,
    shards,
    storages,
    tensors,
)
from distlab.util.replacing import replace_until


def install(undo: contextlib.ExitStack, is_in_rank: Callable[[], bool], name: str) -> None:
    """Change torch's surface until ``undo`` is closed.

    Args:
        is_in_rank: Function that returns whether the calling thread belongs to a rank.
        name: Name of the GPUs.
    """
    replace = partial(replace_until, undo)

    def of_ranks(owner: Any, attribute: str, value: Any) -> None:
        real = getattr(owner, attribute)

        @wraps(real)
        def choose(*args: Any, **kwargs: Any) -> Any:
            return (value if is_in_rank() else real)(*args, **kwargs)

        replace(owner, attribute, choose)

    tensors.install(replace)
    storages.install(replace)
    loading.install(replace)
    shards.install(replace)
    cuda.install(replace, of_ranks, name)
    one_process.install(of_ranks)
    backend.install(undo)
    autocast.install(undo, of_ranks)
    batchnorm.install(undo)
    composites.install(undo)
