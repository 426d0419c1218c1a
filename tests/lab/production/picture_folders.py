"""Small trees of JPEG files, as the trainer reads them, and configurations that train quickly."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from distlab.production.config import Config, make_config
from distlab.production.datasets import open_data

SIDE = 16
CLASSES = {"ant": 3, "bee": 4}
QUICK = {
    "model": "transformer",
    "data": "synthetic",
    "image_size": 8,
    "batch_size": 64,
    "optimizer": "adamw",
    "lr": 0.004,
    "num_workers": 0,
    "device": "cpu",
    "tensorboard": False,
}


def quick(**changes: Any) -> Config:
    """Return a configuration whose steps take milliseconds."""
    return make_config({**QUICK, **changes}, "test")


def of_folder(folder: Path, **changes: Any) -> Config:
    """Return a quick configuration for images in a folder."""
    return quick(data="imagefolder", data_dir=folder, augment="crop_flip", **changes)


def write_pictures(folder: Path, per_class: dict[str, int], num_tests: int = 2) -> Path:
    """Write ``folder``/{train,val}/<class>/<number>.jpg, each class with its own brightness."""
    for place, (name, number) in enumerate(per_class.items()):
        for half, count in (("train", number), ("val", num_tests)):
            (folder / half / name).mkdir(parents=True)
            for index in range(count):
                picture(60 * place, index).save(folder / half / name / f"{index}.jpg")
    return folder


def picture(brightness: int, seed: int) -> Image.Image:
    """Return a picture of this brightness with noise."""
    noise = np.random.default_rng(seed).integers(0, 60, (SIDE, SIDE, 3))
    return Image.fromarray((noise + brightness).astype(np.uint8))


def taken(config: Config, keys: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the training images with these (epoch, index) keys, loaded in this process."""
    images = open_data(config).train
    return [images[key][0] for key in keys]
