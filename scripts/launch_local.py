"""Train ResNet-18 on CIFAR-10 with a few processes on this machine.

    python -m scripts.launch_local --epochs 5 --batch_size 128 --lr 0.1 --num_workers 2 --device cpu

If CIFAR-10 is neither in ./data (or $DISTLAB_DATA) nor downloadable, the bundled digits take its
place, and a message says so. Each run keeps its checkpoints in a new folder, out/local/1 and so on;
--resume continues the newest run.
"""

import argparse
import sys
from pathlib import Path

from distlab import data
from distlab.lessons import COURSE
from distlab.production.launching import launch

RUNS = Path("out/local")
CONFIG = COURSE / "configs/digits_cpu.yaml"  # for all other keys
RECIPE = {"model": "resnet18", "optimizer": "sgd", "weight_decay": 5e-4, "label_smoothing": 0}
DIGITS_SIDE = 16  # twice a digit's side, and the smallest side that ResNets accept


def main() -> int:
    """Train as the command line says, and return the trainer's exit code."""
    options = _parser().parse_args()
    keys = {
        "config": CONFIG,
        **RECIPE,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "lr": options.lr,
        "lr_batch_size": options.batch_size,  # so that lr is not scaled
        "num_gpus": options.num_workers,
        "device": options.device,
        "run_dir": RUNS / str(_number(RUNS, resume=options.resume)),
        **_data(),
    }
    return launch([f"--{key}={value}" for key, value in keys.items()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.launch_local",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=128, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.1, help="after the first epoch's warm-up")
    parser.add_argument(
        "--num_workers",
        type=int,
        default=2,
        help="processes that train, a rank each; not those that load data, as in a configuration",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--resume", action="store_true", help="go on with the newest run")
    return parser


def _number(folder: Path, *, resume: bool) -> int:
    """Return the number of the newest run if it is to be resumed, otherwise the next number."""
    newest = max((int(run.name) for run in folder.glob("[0-9]*")), default=0)
    return max(newest, 1) if resume else newest + 1


def _data() -> dict[str, object]:
    """Choose the data set; download CIFAR-10 once, before there are several processes."""
    try:
        data.load("cifar10")
    except data.DataError as error:
        cause = str(error).splitlines()[1].strip()
        print(f"CIFAR-10 cannot be had ({cause}): trains on the bundled digits", file=sys.stderr)
        return {"data": "digits", "image_size": DIGITS_SIDE, "augment": "crop"}
    return {"data": "cifar10", "image_size": 32, "augment": "crop_flip"}


if __name__ == "__main__":
    sys.exit(main())
