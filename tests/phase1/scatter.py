"""Bodies for task 1.3."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grade import WrongResult
from judging.calls import pair, refusal_of
from judging.pretend_device import PretendDevice, device_of, devices_sent
from judging.tensors import given_group

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Shape and dtypes of a batch, whose numbers are random bits."""

    rows: int
    image_dtype: str = "float32"
    image_shape: Shape = (2, 25)
    label_dtype: str = "int64"
    label_shape: Shape = ()
    is_strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Its words in the name of a test."""
        strided = ", strided" if self.is_strided else ""
        return f"{self.rows} rows of {self.image_dtype} and {self.label_dtype}{strided}"

    def batch(self) -> tuple[Tensor, Tensor]:
        """Make images and labels."""
        images = _tensor(self.image_dtype, (self.rows, *self.image_shape), self.seed)
        labels = _tensor(self.label_dtype, (self.rows, *self.label_shape), self.seed + 1)
        if self.is_strided:
            columns_first = images.transpose(0, -1).contiguous().transpose(0, -1)
            return columns_first, torch.stack([labels, labels], dim=1)[:, 0]
        return images, labels


def _tensor(dtype: str, shape: Shape, seed: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if kind == torch.bool else 256
    raw = torch.randint(0, highest, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(kind).view(shape)


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a tensor, bit by bit."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def scatter(lesson: Any, kind: Kind, src: int | None, group: Any = None) -> dict[str, Any]:
    """Return this rank's part of a batch; arguments that are None are left out."""
    holds_it = dist.get_rank(group) == (src or 0)
    batch = kind.batch() if holds_it else None
    given = given_group(group) | ({"src": src} if src is not None else {})
    parts = lesson.scatter_batch(batch, **given)
    images, labels = pair("scatter_batch", parts, "images and labels")
    return {
        "type": type(parts).__name__,
        "images": _description_of(images),
        "labels": _description_of(labels),
        "is_view": batch is None
        or [_is_view(*both) for both in zip((images, labels), batch, strict=True)],
    }


def _description_of(part: Any) -> tuple[list[int], str, str, bytes]:
    if not isinstance(part, Tensor):
        raise WrongResult(f"scatter_batch should return tensors; it returned {part!r:.50}")
    return list(part.shape), str(part.dtype), str(part.device), bytes_of(part)


def _is_view(part: Tensor, whole: Tensor) -> bool:
    """True if the part lies in the memory of the whole, or is empty."""
    same = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return same or not part.numel()


WRONG_BATCHES = {
    "no batch": None,
    "6 images and 5 labels": (6, 5),
    "0 images and 4 labels": (0, 4),
    "4 images and 0 labels": (4, 0),
}


def scatter_what_is_wrong(lesson: Any, what: str, src: int, group: Any = None) -> dict[str, str]:
    """Return the error that the rank raises when the source has no batch, or a wrong one."""
    lengths = WRONG_BATCHES[what]
    holds_it = dist.get_rank(group) == src and lengths
    batch = (torch.zeros(lengths[0], 2), torch.zeros(lengths[1])) if holds_it else None
    return refusal_of(lambda: lesson.scatter_batch(batch, src, group=group))


def scatter_on_device(lesson: Any, kind: Kind, src: int, is_text: bool) -> dict[str, Any]:
    """Return the devices of the rank's rows, and of the tensors that it has sent or received."""
    with PretendDevice() as device:
        batch = None
        if dist.get_rank() == src:
            images, labels = kind.batch()
            batch = images.to(device), labels.to(device)
        with devices_sent() as devices:
            parts = lesson.scatter_batch(batch, src, device=str(device) if is_text else device)
    images, labels = pair("scatter_batch", parts, "images and labels")
    with torch._C.DisableTorchFunction():  # the mark stays with the memory
        numbers = [bytes_of(images), bytes_of(labels)]
    return {
        "devices": [str(device_of(images)), str(device_of(labels))],
        "travelled": devices,
        "numbers": numbers,
        "device": str(device),
    }
