"""The data sets of a training run: images or texts, for training and for tests."""

from dataclasses import dataclass
from typing import Any

from distlab.production.config import Config
from distlab.production.images import open_images
from distlab.production.jpegs import CodedImages
from distlab.production.language import open_texts


@dataclass(frozen=True)
class Data:
    """The training and the test samples, indexed by ``Key``."""

    train: Any
    test: Any
    num_classes: int  # of images; for texts, the size of the vocabulary


def open_data(config: Config) -> Data:
    """Open the data that a configuration names; called on all ranks.

    Raises:
        DataError: Files are missing or damaged; the message says what to do.
    """
    if config.is_language:
        return Data(*open_texts(config))
    train, test, num_classes = open_images(config)
    if config.decode == "torchvision":
        return Data(CodedImages(train), CodedImages(test), num_classes)
    return Data(train, test, num_classes)
