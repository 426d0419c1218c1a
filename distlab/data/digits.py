"""Handwritten digits, 8 x 8 pixels: real images without a download, the default of the course."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distlab.data.splits import DataError, ImageTensors, Splits

_WHITE = 16  # a pixel is the number of dark points in a 4 x 4 cell
_MEAN, _STD = (0.3059,), (0.3766,)  # training images, scaled to [0, 1]
_TEST_PER_CLASS = 36
_SPLIT_SEED = 0


def load_digits() -> Splits:
    """Return scikit-learn's 1,797 bundled digits: 1,437 to train on and 360 to test on.

    The test half has 36 images of each of the 10 classes. The split never changes: numpy promises
    that `RandomState` draws the same numbers forever.

    Raises: DataError: scikit-learn, which contains the file, is not installed.
    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI repository.
    """
    pixels, labels = _read()
    is_test = _test_mask(labels)
    train, test = (
        ImageTensors(pixels[half], labels[half], white=_WHITE, mean=_MEAN, std=_STD)
        for half in (~is_test, is_test)
    )
    return Splits("digits", train, test, 10, (1, 8, 8), _MEAN, _STD)


@functools.cache  # one copy serves all ranks of a simulated world; ImageTensors never writes to it
def _read() -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(np.loadtxt(_bundled_file(), delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].long()


def _bundled_file() -> Path:
    # Only the file is needed; importing sklearn takes 1.5 s, in every rank of every world.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits come with scikit-learn, which is missing: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _test_mask(labels: Tensor) -> Tensor:
    """Return (N,) bool, True for the images of the test half."""
    random = np.random.RandomState(_SPLIT_SEED)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = np.flatnonzero(labels.numpy() == label)
        mask[random.permutation(members)[:_TEST_PER_CLASS]] = True
    return mask
