"""Datasets for every lesson: `load("digits")` needs no download and is the default.

splits = load("digits")
image, label = splits.train[0]          # float32 (1, 8, 8), 0 .. 9
sequences = tokens(splits)              # the same images for a GPT
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlab.data.digits import load_digits
from distlab.data.download import data_root, rank_zero_first
from distlab.data.folders import load_image_folder
from distlab.data.sequences import TokenSplits, tokens
from distlab.data.splits import DataError, ImageShape, ImageTensors, SizedDataset, Splits
from distlab.data.standard import load_cifar10, load_mnist
from distlab.data.synthetic import make_synthetic
from distlab.util.text import unknown_name

__all__ = [
    "DATASETS",
    "DataError",
    "ImageShape",
    "ImageTensors",
    "SizedDataset",
    "Splits",
    "TokenSplits",
    "load",
    "rank_zero_first",
    "tokens",
]

_BUILT_IN: dict[str, Callable[..., Splits]] = {"digits": load_digits, "synthetic": make_synthetic}
_FROM_FILES: dict[str, Callable[..., Splits]] = {
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "imagefolder": load_image_folder,
}
DATASETS = (*_BUILT_IN, *_FROM_FILES)


def load(name: str, *, root: str | Path | None = None, **options: Any) -> Splits:
    """Return the train and test half of a dataset, downloading it first where it has to be.

        name           images           options
        digits         (1, 8, 8)        none; bundled, 1,797 images
        synthetic      as you like      image_shape, num_classes, train_size, test_size, seed
        mnist          (1, 28, 28)      none
        cifar10        (3, 32, 32)      none
        imagefolder    (3, S, S)        image_size (S, 224 by default), augment

    Args:
        root: folder of the files, by default $DISTLAB_DATA, else ./data; the first two need none.
    Returns: images are float32 (C, H, W), normalised per channel; labels are int.
    Raises:
        ValueError: if there is no such dataset; names the nearest.
        TypeError: if the dataset has no such option.
        DataError: if the data cannot be had; says what to do.
    Cost: mnist and cifar10 hold one collective, so in a world all ranks must load them.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name](**options)
    if name in _FROM_FILES:
        return _FROM_FILES[name](data_root(root), **options)
    raise unknown_name("dataset", name, DATASETS)
