"""Images that the rank decodes: the ones that Pillow makes, whichever process does what.

Where torchvision has no operator for JPEG files, Pillow decodes in its place.
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from picture_folders import of_folder
from PIL import Image
from torch import Tensor

from distlab.production import jpegs
from distlab.production.config import Config
from distlab.production.datasets import open_data
from distlab.production.errors import ConfigError
from distlab.production.jpegs import Plan, check_decoder, decoded
from distlab.production.loading import loader_of
from distlab.production.program import run_program
from distlab.production.samples import BAD
from solutions.phase4_production.imagenet_trainer import train

# torchvision 0.29 says that its decoders will move to torchcodec.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
CPU = torch.device("cpu")
NUMBER = 6  # pictures of a class


def by_pillow(files: Sequence[Tensor], _device: object) -> list[Tensor]:
    opened = [Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB") for file in files]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in opened]


def has_operator() -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_decoder(CPU)
    except ConfigError:
        return False
    return True


DECODERS = [by_pillow, *([jpegs._decode] if has_operator() else [])]


@pytest.fixture(params=DECODERS, ids=lambda decoder: decoder.__name__, autouse=True)
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    with mock.patch.object(jpegs, "_decode", request.param):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of JPEG files of different sizes, some of them grey."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(2)
    for half in ("train", "val"):
        for name in ("ant", "bee"):
            (folder / half / name).mkdir(parents=True)
            for k in range(NUMBER):
                coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
                photo = coarse.resize((90 + 7 * k, 120 - 9 * k)).convert("L" if k == 2 else "RGB")
                photo.save(folder / half / name / f"{k}.jpg")
    return folder


def batches_of(config: Config, half: str, keys: Sequence[tuple[int, int]]) -> Any:
    """Return the samples with these keys, as the rank gets them in batches of five."""
    parts = [keys[k : k + 5] for k in range(0, len(keys), 5)]
    made = [*decoded(loader_of(getattr(open_data(config), half), parts, config, CPU), CPU)]
    return tuple(torch.cat(column) for column in zip(*made, strict=True))


# --- the same images -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "changes"),
    [
        ("train", {"num_workers": 1}),
        ("train", {"image_size": 32}),
        ("train", {"model": "resnet18", "progressive_resize": {0: 80, 2: 96}}),
        ("train", {"augment": "crop"}),
        ("train", {"augment": "none"}),
        ("test", {}),
    ],
    ids=["train", "small", "progressive", "crop", "none", "test"],
)
def test_the_images_are_those_of_pillow(photos: Path, half: str, changes: dict[str, Any]) -> None:
    config = of_folder(photos).model_copy(update={"image_size": 72, **changes})
    keys = [(epoch, index) for epoch in (0, 3) for index in range(2 * NUMBER)][::-1]
    for part in (keys[:12], keys[12:]):  # an epoch each, as its images have one size
        expected, labels = batches_of(config, half, part)
        on_rank = config.model_copy(update={"decode": "torchvision"})
        found, found_labels = batches_of(on_rank, half, part)
        assert found.dtype == torch.uint8
        assert found_labels.tolist() == labels.tolist()
        assert found.shape == expected.shape
        assert int((found.int() - expected.int()).abs().max()) <= 1


def test_an_empty_part_of_a_batch_stays_empty(photos: Path) -> None:
    config = of_folder(photos, decode="torchvision", num_workers=0)
    loader = loader_of(open_data(config).train, [[], [(0, 1)]], config, CPU)
    assert [len(images) for images, _ in decoded(loader, CPU)] == [0, 1]


# --- files that are not for the device -----------------------------------------------------------


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


PHOTO = Image.fromarray(np.random.default_rng(4).integers(0, 256, (40, 60, 3), dtype=np.uint8))
WHOLE = saved(PHOTO, format="JPEG")
OTHERS = {
    "PNG": saved(PHOTO, format="PNG"),
    "CMYK": saved(PHOTO.convert("CMYK"), format="JPEG"),
    "RGB": saved(PHOTO, format="JPEG", keep_rgb=True),
    "bytes after the end": WHOLE + b"more",
    "cut off": WHOLE[: len(WHOLE) // 2],
    "no image": b"\xff\xd8\xff no picture",
    "missing": b"",
}


@pytest.mark.parametrize("name", OTHERS)
def test_pillow_decodes_what_may_not_be_for_the_device(
    photos: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    images = open_data(of_folder(photos, decode="torchvision")).train
    path = photos / "train" / "ant" / "1.jpg"
    before = path.read_bytes()
    path.write_bytes(OTHERS[name])
    if name == "missing":
        path.unlink()
    (coded, label), (expected, its_label) = images[4, 1], images.images[4, 1]
    path.write_bytes(before)
    assert not Plan(*coded.plans[0].tolist()).is_jpeg
    assert torch.equal(coded.content.view(3, 8, 8), expected)
    assert label == its_label == (BAD if name in ("cut off", "no image", "missing") else 0)
    told = capfd.readouterr().err.count(f"warning: {path} cannot be read: ")
    assert told == (2 if label == BAD else 0)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_pillow_decodes_what_the_device_cannot(
    photos: Path, is_damaged: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    config = of_folder(photos, decode="torchvision", num_workers=0)
    path, keys = photos / "train" / "ant" / "1.jpg", [(2, k) for k in range(5)]
    decode = jpegs._decode
    expected, labels = batches_of(config, "train", keys)
    before = path.read_bytes()
    refused = before[: before.index(b"\xff\xc4")] + b"\xff\xd9" if is_damaged else before
    path.write_bytes(refused)

    def without_one(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        if any(file.numpy().tobytes() == refused for file in files):
            raise RuntimeError("Failed to decode batch: 3")
        return decode(files, device)

    with mock.patch.object(jpegs, "_decode", without_one):
        found, found_labels = batches_of(config, "train", keys)
    path.write_bytes(before)
    if is_damaged:
        expected[1], labels[1] = 0, BAD
        assert f"warning: {path} cannot be read: " in capfd.readouterr().err
    assert found_labels.tolist() == labels.tolist()
    assert int((found.int() - expected.int()).abs().max()) <= 1


# --- training ------------------------------------------------------------------------------------


def test_a_training_decodes_and_evaluates_on_the_rank(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", "imagefolder", f"--data_dir={photos}", "--model=transformer", "--epochs=2"]
    common += ["--image_size=8", "--batch_size=5", "--device=cpu", "--tensorboard=false"]
    words = [*common, f"--run_dir={tmp_path}", "--num_workers=0", "--decode=torchvision"]
    with mock.patch.object(jpegs, "_made", side_effect=jpegs._made) as made:
        code = run_program(train, "", words)
    assert code == 0, capfd.readouterr().err
    sizes = [len(call.args[1].plans) for call in made.call_args_list]
    assert sizes == [5, 5, 2, 5, 5, 2] * 2


def test_a_torchvision_that_cannot_decode_is_refused_before_training(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"--data_dir={photos}", "--data=imagefolder", "--decode=torchvision", "--device=cpu"]
    error = RuntimeError("Couldn't load the image extension. If you built\nit, see")
    with mock.patch.object(jpegs, "_decode", side_effect=error):
        code = run_program(train, "", [*words, f"--run_dir={tmp_path}", "--image_size=32"])
    assert code == 78
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: decode: torchvision cannot decode JPEG files on cpu (Couldn't load the image "
        "extension): install builds of torch and torchvision that belong together, or leave decode "
        "out"
    )
    assert not (tmp_path / "checkpoints").exists()


def test_a_gpu_decodes_on_a_stream_of_its_own_that_is_idle(photos: Path) -> None:
    images = open_data(of_folder(photos, decode="torchvision")).train
    calls, gpu = mock.MagicMock(), torch.device("cuda", 0)
    with (
        mock.patch.object(torch, "cuda", calls),
        mock.patch.object(jpegs, "_stream", calls.own),
        mock.patch.object(jpegs, "_made", calls.made),
    ):
        batch = jpegs._on_own_stream(images.images, mock.sentinel.coded, mock.sentinel.targets, gpu)
    assert batch is calls.made.return_value
    own, current = calls.own.return_value, calls.current_stream.return_value
    in_order = [
        mock.call.stream(own),
        mock.call.stream().__enter__(),
        mock.call.made(images.images, mock.sentinel.coded, mock.sentinel.targets, gpu),
        mock.call.stream().__exit__(None, None, None),
        mock.call.own().synchronize(),
        mock.call.made().record_stream(current),
    ]
    assert [call for call in calls.mock_calls if call in in_order] == in_order
