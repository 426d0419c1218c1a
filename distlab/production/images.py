"""Images from folders or memory; the same seed gives the same images on any rank."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from distlab import data
from distlab.data import DataError, rank_zero_first
from distlab.data.download import data_root
from distlab.data.folders import MEAN, STD, check_folders, open_folder, transforms
from distlab.production.archives import open_archives
from distlab.production.config import Config
from distlab.production.digits_files import digits_folder
from distlab.production.samples import BAD, Key, Sample

KEPT_OF_SIDE = 0.875  # fraction of a side above SMALL that an evaluation's centre crop keeps
SMALL = 64  # largest side of images that an evaluation does not crop
T = TypeVar("T")


class Source(Protocol):
    """Stored images, each with its label."""

    labels: Tensor

    def read(self, index: int) -> Any:
        """Return an image, either from PIL or as uint8 (3, H, W)."""

    def name(self, index: int) -> str:
        """Return an image's name for messages."""


Sources = tuple[Source, Source, int]  # training and test images, and the number of classes


class Files:
    """Images in files, decoded on access.

    All paths are in one tensor of bytes, in rows of equal length, which the loader's processes
    share. A list of strings would be copied to each process (pytorch#13246).
    """

    def __init__(self, samples: Sequence[tuple[str, int]]) -> None:
        paths = np.array([os.fsencode(path) for path, _ in samples])
        self.paths = torch.from_numpy(paths.view(np.uint8).reshape(len(paths), -1))
        self.labels = torch.tensor([label for _, label in samples])

    def read(self, index: int) -> Any:
        """Decode a file; PIL raises OSError if it is damaged."""
        image = importlib.import_module("PIL.Image")
        with image.open(self.name(index)) as opened:
            return opened.convert("RGB")

    def content(self, index: int) -> bytes:
        """Read a file."""
        return Path(self.name(index)).read_bytes()

    def name(self, index: int) -> str:
        """Return the path."""
        return os.fsdecode(self.paths[index].numpy().tobytes().rstrip(b"\0"))


class Pixels:
    """Images in memory, as bytes."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def read(self, index: int) -> Tensor:
        """Return the bytes, (3, H, W)."""
        return self.pixels[index]

    def name(self, index: int) -> str:
        """Return a name that contains the image's index."""
        return f"image {index}"


class Images(Dataset[Sample]):
    """The training or the test images, uint8 (3, S, S), indexed by ``Key``.

    They are normalised where the model is, so that a quarter of the bytes travels there. An image
    that cannot be read becomes a black one with the label BAD.
    """

    def __init__(self, source: Source, config: Config, *, is_training: bool) -> None:
        self.source, self.config, self.is_training = source, config, is_training

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        side = self.side(epoch)
        try:
            image = self.source.read(index)
        except Exception as error:  # PIL raises many kinds of errors
            report_bad(self.source.name(index), error)
            return torch.zeros(3, side, side, dtype=torch.uint8), BAD
        transform = transform_of(self.config, side, self.is_training)
        return seeded(transform, image, (self.config.seed, *key)), int(self.source.labels[index])

    def side(self, epoch: int) -> int:
        """Return the side of the images in an epoch."""
        return side_of(self.config, epoch) if self.is_training else self.config.image_size


def report_bad(name: str, reason: object) -> None:
    """Report on standard error that this process cannot read an image."""
    print(f"warning: {name} cannot be read: {reason}", file=sys.stderr, flush=True)


def side_of(config: Config, epoch: int) -> int:
    """Return the side of an epoch's training images, according to ``progressive_resize``."""
    begun = [first for first in config.progressive_resize if first <= epoch]
    return config.progressive_resize[max(begun)] if begun else config.image_size


def seeded(transform: Callable[[Any], T], image: Any, seed: tuple[int, ...]) -> T:
    """Augment an image with random numbers from a seed; torch's generator keeps its state.

    This makes the result the same in any process, on any rank, and after a resume.
    """
    (mixed,) = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(int(mixed) % 2**63)
    augmented = transform(image)
    torch.set_rng_state(before)
    return augmented


_transforms: dict[tuple[Any, ...], Any] = {}  # cache: building one takes longer than applying it


def transform_of(config: Config, side: int, is_training: bool) -> Any:
    """Return what makes an image of this side from a stored one."""
    key = (config.data, config.augment, side, is_training)
    if key not in _transforms:
        v2 = transforms()
        shape = _augment(v2, config, side) if is_training else _centre(v2, side)
        _transforms[key] = v2.Compose([*shape, v2.ToImage(), v2.ToPureTensor()])
    return _transforms[key]


def normalised(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images of bytes as numbers with ImageNet's means and deviations taken out."""
    mean, std = _of_channels(images.device, dtype)
    return images.to(dtype).sub_(mean).div_(std)


@cache
def _of_channels(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the means and the deviations of bytes, (3, 1, 1), which are copied there only once."""
    of_bytes = 255 * torch.tensor([MEAN, STD], dtype=torch.float64).view(2, 3, 1, 1)
    mean, std = of_bytes.to(device, dtype)
    return mean, std


def _augment(v2: Any, config: Config, side: int) -> list[Any]:
    if config.augment == "none":
        return _centre(v2, side)
    smallest = 0.08 if side > SMALL else 0.6  # fraction of the area; a small image has no margin
    crop = v2.RandomResizedCrop(side, scale=(smallest, 1.0), antialias=True)
    return [crop, *([v2.RandomHorizontalFlip()] if config.augment == "crop_flip" else [])]


def _centre(v2: Any, side: int) -> list[Any]:
    kept = KEPT_OF_SIDE if side > SMALL else 1.0
    return [v2.Resize(round(side / kept), antialias=True), v2.CenterCrop(side)]


# Opening


def open_images(config: Config) -> tuple[Images, Images, int]:
    """Open the training and the test images, and return them with the number of classes.

    Raises:
        DataError: A folder is missing, has no classes or an empty class, or the two splits have
            different classes; the message says what to do.
    """
    train, test, num_classes = _sources(config)
    halves = Images(train, config, is_training=True), Images(test, config, is_training=False)
    return *halves, num_classes


def _sources(config: Config) -> Sources:
    if config.data == "digits":
        with rank_zero_first():
            return _in_folders(digits_folder(config.data_dir or data_root() / "digits-jpeg"))
    if config.data == "imagefolder":
        folder = Path(config.data_dir or "")
        is_zipped = not (folder / "train").is_dir() and any(folder.glob("train*.zip"))
        return _in_archives(folder) if is_zipped else _in_folders(folder)
    side = config.image_size
    is_made_up = config.data == "synthetic"
    options: dict[str, Any] = {"image_shape": (3, side, side)} if is_made_up else {}
    splits: Any = data.load(config.data, root=config.data_dir, **options)
    halves = splits.train, splits.test
    pixels = [Pixels(half.pixels.expand(-1, 3, -1, -1), half.labels) for half in halves]
    return pixels[0], pixels[1], splits.num_classes


def _in_folders(folder: Path) -> Sources:
    train, test = (Files(open_folder(half).samples) for half in check_folders(folder, "data_dir"))
    return train, test, len({*train.labels.tolist()})


def _in_archives(folder: Path) -> Sources:
    (train, classes), (test, others) = (open_archives(folder, half) for half in ("train", "val"))
    if classes != others:
        only = min({*classes} ^ {*others})
        raise DataError(f"{folder}: only one of train*.zip and val*.zip has the class {only}")
    return train, test, len(classes)
