"""Datasets for every lesson: `load("digits")` needs no download and is the default.

splits = load("digits")
image, label = splits.train[0]          # float32 (1, 8, 8), 0 .. 9
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlab.data.built_in import load_digits, make_synthetic
from distlab.data.download import data_root, load_cifar10, load_mnist, rank_zero_first
from distlab.data.folders import load_image_folder
from distlab.data.splits import DataError, ImageShape, ImageTensors, SizedDataset, Splits
from distlab.util.text import unknown_name

__all__ = [
    "DATASETS",
    "DataError",
    "ImageShape",
    "ImageTensors",
    "SizedDataset",
    "Splits",
    "load",
    "rank_zero_first",
]

_BUILT_IN: dict[str, Callable[..., Splits]] = {"digits": load_digits, "synthetic": make_synthetic}
_FROM_FILES: dict[str, Callable[..., Splits]] = {
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "imagefolder": load_image_folder,
}
DATASETS = (*_BUILT_IN, *_FROM_FILES)


def load(name: str, *, root: str | Path | None = None, **options: Any) -> Splits:
    """Return the training and test splits of a dataset, downloading it if necessary.

        name           images           options
        digits         (1, 8, 8)        none; bundled, 1,797 images
        synthetic      any              image_shape, num_classes, train_size, test_size, seed
        mnist          (1, 28, 28)      none
        cifar10        (3, 32, 32)      none
        imagefolder    (3, S, S)        image_size (S, 224 by default)

    Args:
        root: Folder of the data files; by default $DISTLAB_DATA, or ./data if that is not set. The
            first two datasets need no files.
    Returns: images are float32 (C, H, W), normalised per channel; labels are int.
    Raises:
        ValueError: There is no such dataset; the message names the closest one.
        TypeError: The dataset has no such option.
        DataError: The data is not available; the message says what to do.
    Cost: mnist and cifar10 call a collective, so all ranks of a world must load them.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name](**options)
    if name in _FROM_FILES:
        return _FROM_FILES[name](data_root(root), **options)
    raise unknown_name("dataset", name, DATASETS)
