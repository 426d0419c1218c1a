"""Images in zip archives: a data set in a few large files, of which any image can be read.

    cd /data/imagenet/train && zip -0 -q -r ../train.zip . && cd ../val && zip -0 -q -r ../val.zip .

Members are stored, not compressed, and lie in a folder for each class: n01440764/0001.JPEG.
"""

import importlib
import io
import os
import struct
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from distlab.data import DataError
from distlab.torchvision_repair import import_torchvision

HEADER_BYTES, LENGTHS_AT = 30, 26  # of a member's own header, and in it, of two fields after it


class Members:
    """Images in archives, read and decoded on access.

    An image is known by its archive, offset and size. These are in a tensor, which the loader's
    processes share; a million entries of zipfile's directory would be copied to each of them.
    """

    def __init__(self, archives: Sequence[Path], places: Tensor, labels: Tensor) -> None:
        self.archives, self.places, self.labels = archives, places, labels

    def read(self, index: int) -> Any:
        """Decode an image; PIL raises OSError if it is damaged."""
        image = importlib.import_module("PIL.Image")
        return image.open(io.BytesIO(self.content(index))).convert("RGB")

    def content(self, index: int) -> bytes:
        """Read an image's file."""
        return self._member(index)[1]

    def name(self, index: int) -> str:
        """Return the names of the archive and of the member."""
        return f"{self.archives[int(self.places[index, 0])]}: {self._member(index)[0]}"

    def _member(self, index: int) -> tuple[str, bytes]:
        """Return a member's name and content."""
        archive, offset, size = self.places[index].tolist()
        file = _descriptor(self.archives[archive])
        header = os.pread(file, HEADER_BYTES, offset)
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, LENGTHS_AT)
        name = os.pread(file, name_bytes, offset + HEADER_BYTES)
        content = os.pread(file, size, offset + HEADER_BYTES + name_bytes + extra_bytes)
        return name.decode(errors="replace"), content


@cache
def _descriptor(archive: Path) -> int:
    """Open an archive, once in each process."""
    return os.open(archive, os.O_RDONLY)


def open_archives(folder: Path, half: str) -> tuple[Members, list[str]]:
    """Read the directories of ``folder``/``half``*.zip, and return the images and the classes.

    Raises:
        DataError: There is no such archive, or one is damaged, compressed or empty.

    Cost: about 10 s for a million images.
    """
    archives = sorted(folder.glob(f"{half}*.zip"))
    if not archives:
        raise DataError(f"{folder} has no {half}*.zip beside its other archives")
    entries = [(number, info) for number, path in enumerate(archives) for info in _entries(path)]
    names = [PurePosixPath(info.filename).parent.name for _, info in entries]
    classes = sorted({*names})
    numbers = {name: number for number, name in enumerate(classes)}
    places = torch.tensor([(k, info.header_offset, info.file_size) for k, info in entries])
    return Members(archives, places, torch.tensor([numbers[name] for name in names])), classes


def _is_image(name: str) -> bool:
    """Return whether a file is in a folder and has a suffix of torchvision's image files."""
    path = PurePosixPath(name)
    known = import_torchvision().datasets.folder.IMG_EXTENSIONS
    return bool(path.parent.name) and path.suffix.lower() in known


def _entries(archive: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = [info for info in opened.infolist() if _is_image(info.filename)]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{archive} cannot be read: {error}") from None
    if not entries:
        raise DataError(f"{archive} has no images")
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries):
        raise DataError(f"{archive} is compressed: make it with zip -0, and images are found fast")
    return entries
