"""Pictures of what was measured (matplotlib, without a screen)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from distlab.words import counted

if TYPE_CHECKING:
    from phase1_data_parallel.given import EpochResult

STYLES = ("-", "--", ":", "-.")  # curves that coincide must both be seen


def training_curves(histories: Mapping[int, Sequence[EpochResult]], path: Path) -> None:
    """Draw loss per step, test accuracy per epoch and images/s, one curve per number of workers.

    Args:
        histories: number of workers -> history.
        path: the PNG to write; its folder exists.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    for number, (workers, history) in enumerate(histories.items()):
        label = counted(workers, "worker")
        look = {"linestyle": STYLES[number % len(STYLES)], "linewidth": 3 - 1.5 * number}
        steps = [step for result in history for step in result.step_losses]
        epochs = [result.epoch for result in history]
        loss.plot(steps, label=label, **look)
        accuracy.plot(epochs, [100 * result.test_accuracy for result in history], **look)
        speed.bar(label, history[-1].images_per_s, width=0.5)
    loss.set(title="training loss", xlabel="step", ylabel="cross entropy", yscale="log")
    loss.legend()
    accuracy.set(title="test accuracy", xlabel="epoch", ylabel="%")
    speed.set(title="speed, last epoch", ylabel="images/s")
    for axes in (loss, accuracy, speed):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
