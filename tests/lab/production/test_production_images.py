"""Training images: the same on any rank, with a warning for each one that cannot be read."""

import io
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from picture_folders import CLASSES, SIDE, of_folder, picture, quick, taken, write_pictures
from ranks import on_ranks

from distlab.data import DataError
from distlab.production import digits_files
from distlab.production.batches import on_device
from distlab.production.config import make_config
from distlab.production.datasets import open_data
from distlab.production.digits_files import digits_folder
from distlab.production.images import Files, side_of
from distlab.production.samples import BAD


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), CLASSES)


@pytest.fixture
def broken(pictures: Path, tmp_path: Path) -> Path:
    """A copy of the pictures in which the last ant's file is corrupt."""
    folder = tmp_path / "broken"
    shutil.copytree(pictures, folder)
    (folder / "train" / "ant" / "2.jpg").write_bytes(b"\xff\xd8\xff no picture")
    return folder


# --- augmentation --------------------------------------------------------------------------------


def test_epoch_index_and_seed_decide_how_an_image_is_augmented(pictures: Path) -> None:
    config = of_folder(pictures)
    first, again, later = taken(config, [(0, 0), (0, 0), (1, 0)])
    (other_seed,) = taken(of_folder(pictures, seed=1), [(0, 0)])
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other_seed)


def test_without_augmentation_an_image_is_the_file_which_the_device_normalises(
    pictures: Path,
) -> None:
    config = make_config({**of_folder(pictures).model_dump(), "augment": "none"}, "")
    config = config.model_copy(update={"image_size": SIDE})
    (found,) = taken(config, [(3, 0)])
    pixels = np.asarray(picture_in(pictures / "train" / "ant" / "0.jpg"))
    assert torch.equal(found, torch.from_numpy(pixels.copy()).permute(2, 0, 1))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = torch.from_numpy((pixels / 255 - mean) / std).permute(2, 0, 1)
    for precision, tolerance in (("fp32", 1e-5), ("fp64", 1e-12)):
        exact = config.model_copy(update={"precision": precision})
        (ready,) = on_device(found[None], exact, torch.device("cpu"))
        assert torch.allclose(ready.double(), expected, atol=tolerance)


def picture_in(path: Path) -> Any:
    with digits_files.importlib.import_module("PIL.Image").open(path) as opened:
        return opened.convert("RGB")


def test_progressive_resize_is_for_training_alone(pictures: Path) -> None:
    config = of_folder(pictures, model="resnet18", image_size=24).model_copy(
        update={"progressive_resize": {0: 8, 2: 16}}
    )
    assert [side_of(config, epoch) for epoch in range(4)] == [8, 8, 16, 16]
    late = config.model_copy(update={"progressive_resize": {2: 16}})
    assert [side_of(late, epoch) for epoch in range(4)] == [24, 24, 16, 16]
    data = open_data(config)
    assert data.train[0, 0][0].shape == (3, 8, 8)
    assert data.train[5, 0][0].shape == (3, 16, 16)
    assert data.test[5, 0][0].shape == (3, 24, 24)


# --- images that cannot be read ------------------------------------------------------------------


def test_a_damaged_file_comes_out_black_without_a_class(
    broken: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image, label = open_data(of_folder(broken)).train[0, 2]
    assert (label, float(image.abs().max()), image.shape) == (BAD, 0, (3, 8, 8))
    told = capfd.readouterr().err
    assert told.startswith(f"warning: {broken}/train/ant/2.jpg cannot be read: ")


def _jpeg() -> bytes:
    file = io.BytesIO()
    picture(90, 3).save(file, "JPEG")
    return file.getvalue()


JPEG = _jpeg()


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(0, len(JPEG)),
    changes=st.lists(st.tuples(st.integers(0, len(JPEG) - 1), st.integers(0, 255)), max_size=4),
)
def test_whatever_bytes_a_file_has_training_goes_on(
    pictures: Path,
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    changes: list[tuple[int, int]],
) -> None:
    damaged = bytearray(JPEG)
    for place, byte in changes:
        damaged[place] = byte
    path = tmp_path_factory.mktemp("damaged") / "0.jpg"
    path.write_bytes(damaged[:length])
    images = open_data(of_folder(pictures)).train
    images.source = Files([(str(path), 1)])
    image, label = images[0, 0]
    assert image.shape == (3, 8, 8)
    assert label in (1, BAD)


# --- folders -------------------------------------------------------------------------------------


def test_classes_are_counted_and_the_halves_found(pictures: Path, tmp_path: Path) -> None:
    data = open_data(of_folder(pictures))
    assert (len(data.train), len(data.test), data.num_classes) == (7, 4, 2)
    renamed = tmp_path / "renamed"
    shutil.copytree(pictures, renamed)
    (renamed / "val").rename(renamed / "test")
    assert len(open_data(of_folder(renamed)).test) == 4


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: shutil.rmtree(folder), "/train does not exist"),
        (lambda folder: shutil.rmtree(folder / "train"), "/train does not exist"),
        (lambda folder: shutil.rmtree(folder / "val"), "/val does not exist. An image folder"),
        (lambda folder: shutil.rmtree(folder / "val" / "bee"), "val lacks bee"),
        (lambda folder: shutil.rmtree(folder / "train" / "ant"), "train lacks ant"),
        (lambda folder: (folder / "train" / "cat").mkdir(), "val lacks cat"),
        (lambda folder: _without_files(folder / "train" / "ant"), "ant"),
        (lambda folder: _without_files(folder / "val" / "bee"), "bee"),
        (lambda folder: _without_classes(folder), "has no class folders"),
    ],
    ids=[
        "all",
        "train",
        "val",
        "val/bee",
        "train/ant",
        "cat",
        "empty-ant",
        "empty-bee",
        "no-classes",
    ],
)
def test_a_folder_that_is_not_as_it_should_be(
    pictures: Path, tmp_path: Path, spoil: Any, told: str
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(pictures, folder)
    spoil(folder)
    with pytest.raises(DataError) as caught:
        open_data(of_folder(folder))
    assert told in str(caught.value)
    assert str(folder) in str(caught.value)


def _without_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _without_classes(folder: Path) -> None:
    for half in ("train", "val"):
        shutil.rmtree(folder / half)
        (folder / half).mkdir()


# --- the digits as files -------------------------------------------------------------------------


def few_digits(*_name: str) -> Any:
    """Return twelve digits instead of 1,797."""
    half = mock.Mock(
        pixels=torch.arange(12 * 64).remainder(17).to(torch.uint8).reshape(12, 1, 8, 8),
        labels=torch.arange(12) % 10,
    )
    return mock.Mock(train=half, test=half)


def _made_by_a_rank(folder: Path) -> list[str]:
    with mock.patch("distlab.data.load", few_digits):
        dist.barrier()
        made = digits_folder(folder)
    return sorted(str(path.relative_to(folder)) for path in made.rglob("*.jpg"))


def test_two_processes_make_the_digits_at_once(tmp_path: Path) -> None:
    one, other = on_ranks(_made_by_a_rank, 2, tmp_path / "digits")
    assert one == other
    assert len(one) == 24
    assert one[0] == "train/0/0000.jpg"
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_a_folder_with_other_images_is_not_taken_for_the_digits(pictures: Path) -> None:
    with pytest.raises(DataError, match="the bundled digits were not written to it"):
        open_data(quick(data="digits", data_dir=pictures))
    assert sorted(path.name for path in (pictures / "train").iterdir()) == sorted(CLASSES)


# --- archives ------------------------------------------------------------------------------------


def zipped(folder: Path, target: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write the images of a folder to archives, those of training to two."""
    target.mkdir()
    for half, number in (("train", 2), ("val", 1)):
        files = sorted(path for path in (folder / half).rglob("*") if path.is_file())
        for k in range(number):
            with zipfile.ZipFile(target / f"{half}-{k}.zip", "w", compression) as archive:
                archive.mkdir(files[0].parent.name)
                archive.writestr("x/.DS_Store", b"no image")
                archive.writestr("list.jpg", b"in no class")
                for path in files[k::number]:
                    archive.write(path, f"x/{path.relative_to(folder / half)}")
    return target


def test_archives_hold_the_images_of_folders(pictures: Path, tmp_path: Path) -> None:
    folders, archives = of_folder(pictures), of_folder(zipped(pictures, tmp_path / "zips"))
    for half in ("train", "test"):
        first, second = (getattr(open_data(config), half) for config in (folders, archives))
        assert stored_in(first) == stored_in(second)


def stored_in(images: Any) -> list[tuple[int, bytes]]:
    """Return the label and the pixels of every stored image, in one order."""
    read = (np.asarray(images.source.read(k)).tobytes() for k in range(len(images)))
    return sorted(zip(images.source.labels.tolist(), read, strict=True))


def test_a_damaged_member_is_named_and_comes_out_black(
    broken: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = open_data(of_folder(zipped(broken, tmp_path / "zips"))).train
    labels = [images[0, index][1] for index in range(len(images))]
    assert labels.count(BAD) == 1
    assert re.search(r"train-0\.zip: x/ant/2\.jpg cannot be read: ", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda zips: (zips / "val-0.zip").unlink(), "has no val*.zip"),
        (lambda zips: (zips / "train-1.zip").write_bytes(b"PK"), "train-1.zip cannot be read"),
        (lambda zips: zipfile.ZipFile(zips / "train-1.zip", "w").close(), "has no images"),
        (lambda zips: _add(zips / "val-0.zip", "cat/0.jpg"), "has the class cat"),
        (lambda zips: _add(zips / "val-0.zip", "ant/9.jpg", zipfile.ZIP_DEFLATED), "zip -0"),
    ],
    ids=["no-val", "damaged", "empty", "cat", "compressed"],
)
def test_archives_that_are_not_as_they_should_be(
    pictures: Path, tmp_path: Path, spoil: Any, told: str
) -> None:
    folder = zipped(pictures, tmp_path / "zips")
    spoil(folder)
    with pytest.raises(DataError) as caught:
        open_data(of_folder(folder))
    assert told in str(caught.value)


def _add(archive: Path, name: str, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(name, b"x" * 100, compression)
