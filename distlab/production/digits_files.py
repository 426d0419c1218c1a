"""The bundled digits as a tree of JPEG files, so that image folders can be tried offline."""

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from distlab import data
from distlab.data import DataError

SIDE = 32  # side of the images in the files, four times that of the digits
MARK = "distlab-digits"  # file that identifies a folder made here


def digits_folder(folder: Path) -> Path:
    """Create ``folder``/{train,val}/{0 … 9}/0000.jpg if needed; return ``folder``.

    The folder gets its name only when it is complete, so a killed process cannot leave an
    incomplete folder with that name.

    Raises:
        DataError: The folder exists, and was not made by this function.

    Cost: 1,797 files and 3 s on first use.
    """
    if folder.exists() and not (folder / MARK).exists():
        raise DataError(
            f"{folder} is there, and the bundled digits were not written to it: choose a data_dir "
            "that is not there yet, or data: imagefolder to train on what this one holds"
        )
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            _write(partial)
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(folder: Path) -> None:
    splits: Any = data.load("digits")
    for half, images in (("train", splits.train), ("val", splits.test)):
        for index, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
            path = folder / half / str(int(label)) / f"{index:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            _picture(pixels[0].numpy() * (255 // 16)).save(path, quality=95)
    (folder / MARK).touch()


def _picture(values: Any) -> Any:
    image = importlib.import_module("PIL.Image")
    return image.fromarray(values).resize((SIDE, SIDE), image.Resampling.BICUBIC)
