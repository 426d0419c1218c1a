"""Images per second that one core decodes, augments and puts into batches, as ImageNet's are.

    python benchmarks/loader.py [--images 200] [--rounds 3] [--decode torchvision]

Writes JPEG files of 500 x 375 pixels, about 100 kB each, and loads them as training does: a random
part of each, 224 x 224, perhaps mirrored, in batches of 64, in one process with one thread. With
--decode torchvision, it only reads the files, which a rank would decode on its device.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from distlab.production.config import Config, make_config
from distlab.production.datasets import open_data
from distlab.production.loading import evaluation_keys, loader_of

BATCH = 64


def write_images(folder: Path, number: int) -> None:
    """Write smooth pictures with some noise, whose files are as large as photographs."""
    random = np.random.default_rng(0)
    for half, count in (("train", number), ("val", 1)):
        (folder / half / "a").mkdir(parents=True)
        for index in range(count):
            smooth = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            pixels = np.asarray(
                Image.fromarray(smooth).resize((500, 375), Image.Resampling.BICUBIC)
            )
            noisy = np.clip(pixels + random.normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / half / "a" / f"{index}.jpg", quality=90)


def batches(config: Config, number: int) -> Iterator[Any]:
    """Yield the batches of an epoch, as they travel to the rank."""
    keys = evaluation_keys(number, BATCH, rank=0, num_ranks=1)
    for images, _ in loader_of(open_data(config).train, keys, config, torch.device("cpu")):
        yield images


def main() -> None:
    """Print the median speed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", choices=["pillow", "torchvision"], default="pillow")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), options.images)
        keys = {"data": "imagefolder", "data_dir": folder, "image_size": 224, "num_workers": 0}
        config, rates = make_config({**keys, "decode": options.decode}, "here"), []
        for _ in range(options.rounds):
            begun_s = time.perf_counter()
            for _ in batches(config, options.images):
                pass
            rates.append(options.images / (time.perf_counter() - begun_s))
        size = statistics.mean(file.stat().st_size for file in Path(folder, "train/a").iterdir())
    print(f"{statistics.median(rates):.0f} images/s per core, of files of {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
