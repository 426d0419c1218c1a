"""Tensors of many shapes and dtypes, whose sums are exact in any order of addition."""

import hashlib
import threading
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NUMBERS: dict[str, tuple[int, int, int | float]] = {  # by dtype: range of odd numbers, and a factor
    "float64": (2**49, 2**50, 2.0**-50),
    "float32": (2**20, 2**21, 2.0**-21),
    "float16": (2**7, 2**8, 2.0**-8),
    "bfloat16": (2**4, 2**5, 2.0**-5),
    "int64": (2**58, 2**59, 1),
    "uint8": (16, 32, 1),
}
FRACTIONS = ("float32", "float16", "bfloat16", "float64")
LONG = 128  # elements; longer tensors are compared by a checksum
LARGE = 1_050_000, 1_100_000  # range of element counts, all above 2^20
EVEN = 240  # divisible by 1 to 6, 8 and 16
PLACES = 7  # number of different values in ``powers``


class Kind(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.item_bytes


KINDS = [
    *map(Kind, ((60,), (), (0,), (1,), (3,), (7, 2), (101,), (17_001,))),
    *(Kind((7, 2), dtype) for dtype in NUMBERS if dtype != "float32"),
]


def even_size(random: Random, least: int, most: int) -> int:
    """Draw a number of elements that ranks can share evenly, as some answers require."""
    return random.randrange(least, most) // EVEN * EVEN


def uneven_size(random: Random) -> int:
    """Draw a number of elements that 2, 3, 4, 5 or 8 ranks cannot share evenly."""
    return 120 * random.randrange(300, 700) + random.choice((7, 11, 13, 17, 19, 23))


def exact(kind: Kind, rank: int) -> Tensor:
    """Make numbers that need their dtype's full precision; sums over up to 8 ranks are exact."""
    place = KINDS.index(kind) if kind in KINDS else len(KINDS)
    generator = torch.Generator().manual_seed(100 * rank + place)
    low, high, scale = NUMBERS[kind.dtype]
    odd = 2 * torch.randint(low // 2, high // 2, kind.shape, generator=generator) + 1
    return odd.to(getattr(torch, kind.dtype)) * scale


def powers(kind: Kind, rank: int) -> Tensor:
    """Make 2^rank times 1, 2, 4, …, without extra memory; sums over many ranks are exact."""
    x = unwritten(kind, rank)
    for place in range(PLACES):
        x.view(-1)[place::PLACES].fill_(2.0 ** (rank + place))
    return x


def unwritten(kind: Kind, rank: int) -> Tensor:
    """Return an uninitialised tensor, which takes no time to make."""
    del rank
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))


def numbers_of(tensor: Tensor) -> Any:
    """Return a tensor's values in nested lists, or, if it is long, both ends and a checksum."""
    if tensor.numel() <= LONG:
        return tensor.tolist()
    digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()
    ends = tensor.view(-1)[:2].tolist(), tensor.view(-1)[-2:].tolist()
    return [*ends[0], "…", *ends[1], f"checksum of all {digest[:8]}"]


def plain(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the values of several tensors."""
    return [numbers_of(tensor) for tensor in tensors]


def chunk_lengths(num_elements: int, n: int) -> list[int]:
    """Return the chunk lengths of ``tensor_split``, whose first chunks may be an element longer."""
    share, longer = divmod(num_elements, n)
    return [share + (rank < longer) for rank in range(n)]


def own_device(group: Any = None) -> torch.device:
    """Return the device from which this rank can send tensors: its GPU with NCCL, else the CPU."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def is_simulated() -> bool:
    """Return whether ranks are simulated, and so are threads of one process."""
    return threading.current_thread() is not threading.main_thread()


def given_device(group: Any = None) -> dict[str, Any]:
    """Return the keyword argument ``device``, or no arguments if this rank's device is the CPU."""
    device = own_device(group)
    return {} if device.type == "cpu" else {"device": device}


def given_group(group: Any) -> dict[str, Any]:
    """Return the keyword argument ``group``, or no arguments if it is None."""
    return {} if group is None else {"group": group}
