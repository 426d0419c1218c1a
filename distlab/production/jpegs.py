"""JPEG files that the rank decodes on its device, by nvJPEG on a GPU; the loader only reads them.

A loader process sends a file's bytes, with the box and the flip that the image's seed gives. Files
that nvJPEG may read otherwise than Pillow are decoded there as ever: other formats, JPEGs that hold
CMYK or RGB, and those that are cut off.
"""

import importlib
import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from distlab.production.errors import ConfigError
from distlab.production.images import Images, seeded, transform_of
from distlab.production.samples import Key
from distlab.production.types import Batch
from distlab.torchvision_repair import import_torchvision

END = b"\xff\xd9"  # of every whole JPEG file


class Plan(NamedTuple):
    """What makes an image from its part of the content."""

    epoch: int
    place: int  # index of the image
    num_bytes: int
    is_jpeg: int = 0  # 0: the content is the finished image's pixels
    top: int = 0
    left: int = 0
    height: int = 0  # of the box; 0: no box was drawn
    width: int = 0
    is_mirrored: int = 0


class Coded(NamedTuple):
    """Images before decoding, in two tensors, since each one that a process sends costs a file."""

    content: Tensor  # uint8, end to end
    plans: Tensor  # int64 (b, 9), a Plan in each row


class CodedImages(Dataset[tuple[Coded, int]]):
    """Images, indexed by ``Key``, as far as a loader process makes them."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Coded, int]:
        content, header = _read(self.images.source, key[1])
        if header is None:
            pixels, label = self.images[key]
            return Coded(pixels.flatten(), torch.tensor([Plan(*key, pixels.numel())])), int(label)
        plan = Plan(*key, len(content), 1, *_drawn(self.images, header, key))
        label = self.images.source.labels[key[1]]
        return Coded(_bytes(content), torch.tensor([plan])), int(label)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _read(source: Any, index: int) -> tuple[bytes, Any]:
    """Return a file, and what Pillow reads of its header, or None if Pillow must decode it too."""
    with suppress(Exception):  # PIL raises many kinds of errors
        content = source.content(index)
        header = importlib.import_module("PIL.Image").open(io.BytesIO(content))
        is_usual = header.format == "JPEG" and header.mode in ("L", "RGB")
        if is_usual and header.info.get("adobe_transform", 1) and content.endswith(END):
            return content, header
    return b"", None


def _drawn(images: Images, header: Any, key: Key) -> tuple[int, ...]:
    """Return the box and the flip that Pillow's image would get, or nothing if none are drawn."""
    if not images.is_training or images.config.augment == "none":
        return ()
    crop, *flips = transform_of(images.config, images.side(key[0]), True).transforms[:-2]

    def draw(image: Any) -> tuple[int, ...]:
        box = crop.make_params([image])
        is_mirrored = any(float(torch.rand(1)) < flip.p for flip in flips)
        return box["top"], box["left"], box["height"], box["width"], int(is_mirrored)

    return seeded(draw, header, (images.config.seed, *key))


# On the rank


def check_decoder(device: torch.device) -> None:
    """Decode a small image.

    Raises:
        ConfigError: torchvision cannot decode on this device.
    """
    file = io.BytesIO()
    importlib.import_module("PIL.Image").new("RGB", (16, 16)).save(file, "JPEG")
    try:
        _decode([_bytes(file.getvalue())], device)
    except (AttributeError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"decode: torchvision cannot decode JPEG files on {device} ({reason}): install builds "
            "of torch and torchvision that belong together, or leave decode out"
        ) from None


def decoded(loader: Any, device: torch.device) -> Iterator[Batch]:
    """Yield a loader's batches; images that are still coded are made on the device, as bytes."""
    for inputs, targets in loader:
        if isinstance(inputs, Coded):
            yield _on_own_stream(loader.dataset.images, inputs, targets, device), targets
        else:
            yield inputs, targets


def _on_own_stream(images: Images, coded: Coded, targets: Tensor, device: torch.device) -> Tensor:
    """Make a batch; on a GPU, on a stream that is idle before and after.

    nvJPEG writes into its memory at once, although earlier work of the current stream may still
    read what was there (pytorch/vision#9606). A training's stream is busy; this one is for images.
    The wait at the end keeps the pinned files until they are read.
    """
    if device.type != "cuda":
        return _made(images, coded, targets, device)
    stream = _stream(device)
    with torch.cuda.stream(stream):
        batch = _made(images, coded, targets, device)
    stream.synchronize()
    batch.record_stream(torch.cuda.current_stream(device))
    return batch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _made(images: Images, coded: Coded, targets: Tensor, device: torch.device) -> Tensor:
    """Return images, uint8 (b, 3, S, S); the targets of those that cannot be read become BAD."""
    plans = [Plan(*row) for row in coded.plans.tolist()]
    parts: Any = coded.content.split([plan.num_bytes for plan in plans])  # type: ignore[no-untyped-call]
    files = [part for part, plan in zip(parts, plans, strict=True) if plan.is_jpeg]
    found, made = iter(_tried(files, device)), list[Tensor]()
    side = images.side(plans[0].epoch)
    for row, (part, plan) in enumerate(zip(parts, plans, strict=True)):
        pixels = next(found) if plan.is_jpeg else part.view(3, side, side)
        if pixels is None:
            pixels, targets[row] = images[plan.epoch, plan.place]
        elif plan.is_jpeg:
            pixels = _shaped(images, plan, pixels)
        made.append(pixels.to(device).float())
    return torch.stack(made).round_().to(torch.uint8)


def _tried(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Return the decoded files, and None for each that the device cannot decode."""
    try:
        return [*_decode(files, device)] if files else []
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:  # for one file, all are lost
        return [None] if len(files) == 1 else [_tried([file], device)[0] for file in files]


def _decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    images = import_torchvision().io
    found: list[Tensor] = images.decode_jpeg([*files], images.ImageReadMode.RGB, device)
    return found


def _shaped(images: Images, plan: Plan, pixels: Tensor) -> Tensor:
    """Crop, resize and mirror an image: (3, S, S), as numbers from 0 to 255."""
    side, (_, _, _, _, top, left, height, width, _) = images.side(plan.epoch), plan
    if not height:
        centred: Tensor = transform_of(images.config, side, images.is_training)(pixels)
        return centred
    box = pixels[None, :, top : top + height, left : left + width].float()
    resized = interpolate(box, (side, side), mode="bilinear", antialias=True)[0]
    return resized.flip(-1) if plan.is_mirrored else resized
