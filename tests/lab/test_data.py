"""The datasets: their contents, errors when files are missing, and downloads by one rank."""

import functools
import hashlib
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from distlab import launch
from distlab.data import (
    DATASETS,
    DataError,
    download,
    load,
    rank_zero_first,
)
from distlab.torchvision_repair import import_torchvision


def everything(dataset: Any) -> tuple[Tensor, Tensor]:
    return next(iter(DataLoader(dataset, batch_size=len(dataset))))


# -- load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("digit", "digits"), ("MNIST", "mnist"), ("cifar-10", "cifar10")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"valid: {', '.join(DATASETS)}") as raised:
        load(wrong)
    assert str(raised.value).endswith(f"Did you mean {nearest!r}?")
    assert "\n" not in str(raised.value)


# -- digits ----------------------------------------------------------------------------------------


def test_the_split_of_digits_never_changes() -> None:
    splits = load("digits")
    assert (len(splits.train), len(splits.test)) == (1437, 360)
    assert digest(splits.train) == "e404dbab4f187b67"
    assert digest(splits.test) == "dbc7af74908c4dba"


def digest(dataset: Any) -> str:
    content = dataset.pixels.numpy().tobytes() + dataset.labels.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def test_writing_to_a_sample_changes_no_data() -> None:
    train = load("digits").train
    train[0][0].zero_()
    assert train[0][0].std() > 0.5


# -- ImageTensors and synthetic --------------------------------------------------------------------


def test_many_samples_at_once_equal_single_ones() -> None:
    train = load("synthetic", train_size=8).train
    for (image, label), index in zip(train.__getitems__([5, 0, 5]), [5, 0, 5], strict=True):
        torch.testing.assert_close(image, train[index][0], rtol=0, atol=0)
        assert (label, type(label)) == (train[index][1], int)


def test_synthetic_is_decided_by_its_seed() -> None:
    options = {"image_shape": (2, 6, 5), "num_classes": 3, "train_size": 9, "test_size": 4}
    first, again, other = (load("synthetic", **options, seed=seed) for seed in (1, 1, 2))
    assert (len(first.train), len(first.test), first.num_classes) == (9, 4, 3)
    assert first.train[0][0].shape == first.image_shape == (2, 6, 5)
    assert digest(first.train) == digest(again.train) != digest(other.train)


# -- MNIST and CIFAR-10 ----------------------------------------------------------------------------


def write_mnist(folder: Path, count: int = 5) -> None:
    """Write files like MNIST's; image i has label i, and all its pixels are i."""
    folder.mkdir(parents=True)
    values = bytes(range(count))
    for half in ("train", "t10k"):
        header = struct.pack(">4i", 0x803, count, 28, 28)
        body = b"".join(bytes([value]) * 784 for value in values)
        (folder / f"{half}-images-idx3-ubyte").write_bytes(header + body)
        (folder / f"{half}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, count) + values
        )


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files like CIFAR-10's, of 2 images each; make torchvision accept their checksums."""
    source = import_torchvision().datasets.CIFAR10
    folder = root / source.base_folder
    folder.mkdir(parents=True)

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    batch = {"data": np.repeat(np.arange(6, dtype=np.uint8), 1024).reshape(2, -1), "labels": [7, 8]}
    monkeypatch.setattr(source, "train_list", [write("data_batch_1", batch)])
    monkeypatch.setattr(source, "test_list", [write("test_batch", batch)])
    name, md5 = write("batches.meta", {"label_names": list("0123456789")})
    monkeypatch.setattr(source, "meta", {"filename": name, "key": "label_names", "md5": md5})


@contextmanager
def listener() -> Iterator[str]:
    """Yield the address of a local server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets both datasets' download address, initially a closed port."""
    datasets = import_torchvision().datasets

    def download_from(address: str) -> None:
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(datasets.MNIST, "mirrors", [address])
        monkeypatch.setattr(datasets.CIFAR10, "url", address + datasets.CIFAR10.filename)

    with listener() as address:
        download_from(address)
    return download_from


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    splits = load("mnist", root=tmp_path)
    assert (splits.image_shape, splits.num_classes, len(splits.train)) == ((1, 28, 28), 10, 5)
    image, label = splits.test[3]
    assert (label, image.shape) == (3, (1, 28, 28))
    assert image.unique().item() == pytest.approx((3 / 255 - 0.1307) / 0.3081)


def test_cifar10_is_read_channels_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch)
    splits = load("cifar10", root=tmp_path)
    image, label = splits.train[1]
    assert (label, image.shape, splits.image_shape) == (8, (3, 32, 32), (3, 32, 32))
    pixels = image * torch.tensor(splits.std).view(3, 1, 1) + torch.tensor(splits.mean).view(
        3, 1, 1
    )
    assert (pixels * 255).round().mean((1, 2)).tolist() == [3, 4, 5]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "files", "folder"),
    [
        ("mnist", "{train,t10k}-images-idx3-ubyte.gz", "MNIST/raw"),
        ("cifar10", "cifar-10-python.tar.gz", "."),
    ],
)
def test_offline_the_error_says_what_to_put_where(
    name: str, files: str, folder: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as raised:
        load(name, root=tmp_path)
    message = str(raised.value)
    for part in (
        files,
        f"into {tmp_path / folder}",
        "Connection refused",
        "--data_dir",
        "--data digits",
    ):
        assert part in message
    assert raised.value.__suppress_context__, "torchvision's traceback would follow"


@pytest.mark.parametrize("kept_bytes", [0, 8, 200])
def test_a_damaged_file_is_named_as_a_possible_cause(kept_bytes: int, tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(DataError, match="damaged: delete them"):
        load("mnist", root=tmp_path)


# -- image folders ---------------------------------------------------------------------------------


def write_images(root: Path, half: str, classes: str) -> None:
    for label, name in enumerate(classes):
        (root / half / name).mkdir(parents=True)
        Image.new("RGB", (20, 16), (255, 100 * label, 0)).save(root / half / name / "1.png")


@pytest.mark.parametrize("half", ["val", "test"])
def test_an_image_folder_is_resized_and_normalised(half: str, tmp_path: Path) -> None:
    write_images(tmp_path, "train", "ab")
    write_images(tmp_path, half, "ab")
    splits = load("imagefolder", root=tmp_path, image_size=8)
    assert (splits.num_classes, splits.image_shape, len(splits.test)) == (2, (3, 8, 8), 2)
    image, label = splits.train[1]
    assert (type(image), image.dtype, image.shape, label) == (Tensor, torch.float32, (3, 8, 8), 1)
    pixels = image[:, 4, 4] * torch.tensor(splits.std) + torch.tensor(splits.mean)
    torch.testing.assert_close(pixels * 255, torch.tensor([255.0, 100.0, 0.0]), rtol=0, atol=1e-2)


def test_a_missing_folder_is_named_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"{tmp_path}/train does not exist.*train/<class>.*--data_dir"
    ):
        load("imagefolder", root=tmp_path)
    write_images(tmp_path, "train", "ab")
    with pytest.raises(DataError, match=f"{tmp_path}/val does not exist"):
        load("imagefolder", root=tmp_path)


def test_classes_of_one_half_only_are_named(tmp_path: Path) -> None:
    write_images(tmp_path, "train", "abc")
    write_images(tmp_path, "val", "bcstuvwx")
    with pytest.raises(DataError, match=r"train lacks s, t, u, v, w and 1 more; .*val lacks a$"):
        load("imagefolder", root=tmp_path)


# -- rank_zero_first -------------------------------------------------------------------------------


def run_world(body: Callable[[int], str], size: int, per_node: int | None = None) -> list[str]:
    """Run ``body(rank)`` in a gloo world of processes; return what each returned or raised."""
    return launch.run(answer_of, size, body, per_node or size, backend="gloo", timeout_s=60)


def answer_of(body: Callable[[int], str], per_node: int) -> str:
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % per_node)
    try:
        return body(dist.get_rank())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fetch_slowly(folder: Path, rank: int) -> str:
    with rank_zero_first():
        found = (folder / "file").exists()
        time.sleep(0.2)  # long enough to catch a rank that does not wait
        (folder / "file").touch()
    return "found" if found else "fetched"


def fail_on(bad_rank: int, rank: int) -> str:
    with rank_zero_first():
        if rank == bad_rank:
            raise OSError("disk full")
    return "ran"


def test_rank_zero_fetches_and_the_others_find(tmp_path: Path) -> None:
    answers = run_world(functools.partial(fetch_slowly, tmp_path), 3)
    assert answers == ["fetched", "found", "found"]


def test_one_rank_of_each_machine_goes_first_and_its_failure_reaches_all() -> None:
    answers = run_world(functools.partial(fail_on, 2), 4, per_node=2)
    assert answers.pop(2) == "OSError: disk full"
    for answer in answers:
        assert answer.startswith("DataError")
        assert answer.endswith("rank 2: OSError: disk full")


def test_a_failure_after_rank_zero_is_its_ranks_own() -> None:
    answers = run_world(functools.partial(fail_on, 1), 2)
    assert answers == ["ran", "OSError: disk full"]


def test_without_a_world_the_body_runs_and_its_error_passes() -> None:
    assert not dist.is_initialized()
    assert fail_on(bad_rank=1, rank=0) == "ran"
    with pytest.raises(OSError, match="disk full"):
        fail_on(bad_rank=0, rank=0)


def test_downloads_wait_for_rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def write_then_go() -> Iterator[None]:  # acts as a rank 0 that has just written the files
        write_mnist(tmp_path / "MNIST" / "raw")
        yield

    monkeypatch.setattr(download, "rank_zero_first", write_then_go)
    assert len(load("mnist", root=tmp_path).train) == 5
