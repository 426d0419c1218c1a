"""`distlab train`: run the course's trainer with any data set, model and number of workers."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Dataset = Literal["digits", "mnist", "cifar10", "synthetic", "imagefolder"]
Model = Literal["cnn", "resnet18", "vit", "gpt"]
AllReduce = Literal["native", "naive", "recursive_doubling"]
Gradients = Literal["per_parameter", "flat"]
Backend = Literal["auto", "gloo", "nccl", "sim", "mpi"]
Impl = Literal["solution", "mine"]
Device = Literal["auto", "cpu", "cuda"]


def train(
    dataset: Annotated[Dataset, typer.Option(help="What to train on.")] = "digits",
    model: Annotated[
        Model | None,
        typer.Option(
            help="gpt predicts pixel by pixel: small images only. "
            "[default: cnn, or gpt if --parallelism names pp or tp]",
        ),
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks. [default: 4, or as many as torchrun, mpirun or srun started]",
        ),
    ] = None,
    parallelism: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Such as dp=2,pp=2,tp=2: replicas of the model, stages of a replica, shards of a "
            "stage. [default: dp alone]",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Batch size of all workers together. [default: 64, rounded up to fit]",
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate. [default: depends on the model]")
    ] = None,
    all_reduce: Annotated[AllReduce, typer.Option(help="How to sum gradients.")] = "native",
    gradients: Annotated[
        Gradients,
        typer.Option(help="flat: a single all-reduce instead of one for each."),
    ] = "per_parameter",
    impl: Annotated[
        Impl, typer.Option(help="Whose trainer to use; mine: what you wrote.")
    ] = "solution",
    backend: Annotated[
        Backend,
        typer.Option(help="sim: a simulated cluster, in virtual time; mpi: under mpirun."),
    ] = "auto",
    cluster: Annotated[
        str | None,
        typer.Option(help="With --backend sim: a preset, such as dgx-h100."),
    ] = None,
    device: Annotated[Device, typer.Option()] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    data_root: Annotated[
        Path | None,
        typer.Option(help="Folder of the images. [default: $DISTLAB_DATA or data]"),
    ] = None,
) -> None:
    """Train a model with N workers, each on its share of every batch."""
    options = locals()  # at this point, only the parameters
    from distlab import training

    config = training.make_config(**options)
    training.report(config, training.train(config))
