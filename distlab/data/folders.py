"""Images in folders, one folder per class: the layout of ImageNet."""

import importlib
from pathlib import Path
from typing import Any

import torch

from distlab.data.splits import DataError, Splits
from distlab.torchvision_repair import import_torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, per channel
_CROP = 0.875  # fraction of the shorter side that the centre crop keeps


def load_image_folder(root: Path, *, image_size: int = 224) -> Splits:
    """Return the image splits under ``root``; images are decoded on access.

        root/train/<class>/*.jpg
        root/val/<class>/*.jpg       or test/

    Args: image_size: Side of the images after resizing and centre cropping.
    Raises: DataError: A folder is missing, has no classes or an empty class, or the two
        folders have different classes.
    """
    halves, transform = check_folders(root), _transform(image_size)
    train, test = (open_folder(half, transform) for half in halves)
    image_shape = (3, image_size, image_size)
    return Splits("imagefolder", train, test, len(train.classes), image_shape, MEAN, STD)


OPTION = "--data_dir (or DISTLAB_DATA)"


def check_folders(root: Path, option: str = OPTION) -> tuple[Path, Path]:
    """Return the folders of both splits under ``root``: train/, and val/ or test/.

    Args: option: Option that sets ``root``; error messages mention it.

    Raises: DataError: As for ``load_image_folder``.
    """
    candidates = [root / "val", root / "test"]
    train_folder = root / "train"
    test_folder = next((folder for folder in candidates if folder.is_dir()), candidates[0])
    _check_same(_classes(train_folder, option), _classes(test_folder, option), test_folder)
    return train_folder, test_folder


def _classes(folder: Path, option: str = OPTION) -> list[str]:
    if not folder.is_dir():
        raise DataError(
            f"{folder} does not exist. An image folder holds train/<class>/*.jpg and "
            f"val/<class>/*.jpg (or test/); give the folder above these by {option}."
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(f"{folder} has no class folders; expected {folder}/<class>/*.jpg")
    return names


def _check_same(train: list[str], test: list[str], test_folder: Path) -> None:
    extra, missing = sorted(set(test) - set(train)), sorted(set(train) - set(test))
    if extra or missing:
        raise DataError(
            "both halves must have the same classes. "
            + "; ".join(
                f"{test_folder.with_name(half)} lacks {_some(names)}"
                for half, names in (("train", extra), (test_folder.name, missing))
                if names
            )
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest


def open_folder(folder: Path, transform: Any = None) -> Any:
    """Return torchvision's dataset for a folder that has one subfolder per class.

    Raises: DataError: A class has no images.
    """
    try:
        return import_torchvision().datasets.ImageFolder(folder, transform=transform)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: {error}") from None


def _transform(image_size: int) -> Any:
    v2 = transforms()
    shape = [v2.Resize(round(image_size / _CROP)), v2.CenterCrop(image_size)]
    numbers = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose([*shape, *numbers, v2.ToPureTensor()])


def transforms() -> Any:
    """Return version 2 of torchvision's transforms module."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2")
