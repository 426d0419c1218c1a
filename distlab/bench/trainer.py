"""Compare the production trainer with plain loops that use torch's equivalent strategies."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
import yaml

from distlab import chosen, launch, lessons
from distlab.bench import harness, trainer_contestants
from distlab.bench.contest import WHOSE
from distlab.bench.trainer_contestants import Losses, Rival, Setting, Train
from distlab.production.config import Config, make_config
from distlab.production.errors import ConfigError
from distlab.production.lessons import Lessons, find_lessons
from distlab.production.telemetry import measure
from distlab.util.text import counted

HOUR_S = 3600.0
LARGEST_DIFFERENCE = 0.02  # allowed relative difference between mean losses of the first steps
COMMON = {
    "num_workers": 0,
    "epochs": 10**6,
    "optimizer": "adamw",
    "lr": 1e-3,
    "warmup_epochs": 0,
    "schedule": "constant",
    "save_every": 10**9,  # never, because a plain loop does not save
    "heartbeat_timeout_s": HOUR_S,  # long, because each trainer waits while the others train
}
NOTES = """\
Ours: the trainer with its loader, telemetry, heartbeats and agreement to stop, {steps} steps at a
time. Torch's: a plain loop, with the same model, batches, loader and optimizer, and none of these.
All in one line of the table train in turns; {unit}/s are of all ranks, medians of {repeats} rounds.
Ratio: ours over torch's, of the medians; in parentheses, between which half of the rounds have it.
torch has no parameter server, and its pipelines do not tie a gpt's first and last weight."""
HEADINGS = ("ours", "{unit}/s", "torch's", "{unit}/s", "ratio", "MFU", "torch's")


class Sizes(NamedTuple):
    """Settings of the model and its data: noise for images, and the guidelines for a gpt.

    The transformer is a small ViT.
    """

    model: str = "transformer"
    image_size: int = 16
    batch_size: int = 64
    precision: str = "fp32"
    device: str = "cpu"
    steps: int = 16
    keys: Sequence[str] = ()  # more keys of the configuration, such as layers=12

    @property
    def is_language(self) -> bool:
        """True if the model learns language."""
        return self.model == "gpt"

    def config(self, run_dir: Path, strategy: Mapping[str, Any]) -> Config:
        """Return the trainer's configuration."""
        sizes = {name: getattr(self, name) for name in ("model", "batch_size", "precision")}
        images = {"data": "synthetic", "augment": "none", "image_size": self.image_size}
        images["channels_last"] = self.device == "cuda"
        kind = {"data": "text"} if self.is_language else images
        parts = (key.partition("=") for key in self.keys)
        more = {key: yaml.safe_load(value) for key, _, value in parts}
        given = {**COMMON, **kind, **sizes, "device": self.device, "run_dir": run_dir, **more}
        return make_config({**given, **strategy}, "distlab bench trainer")

    def title(self, ranks: int) -> str:
        """Return the line above the table."""
        size = f"{self.image_size} x {self.image_size}"
        parts = [self.model, *(() if self.is_language else (size,)), *self.keys]
        parts += [f"batches of {self.batch_size}", self.precision]
        return ", ".join([*parts, counted(ranks, f"{self.device} rank")])


class Match(NamedTuple):
    """Ways to run the trainer, and the torch loop to compare them with, if there is one."""

    ours: Mapping[str, Mapping[str, Any]]  # name of a way -> configuration keys
    theirs: Rival | None


def _course(**keys: Any) -> dict[str, Any]:
    return {"strategy": "course", **keys}


PATTERNS = ("native", "ring", "tree", "hierarchical")
REPLICATED = {
    "ddp": {"strategy": "ddp"},
    **{name: _course(communication_pattern=name) for name in PATTERNS},
}
FREED = {"fsdp": {"strategy": "fsdp"}, "ZeRO 3": _course(zero_redundancy=3)}


def matches(ranks: int, model: str) -> list[Match]:
    """Return the matches that are possible with this number of ranks and this model."""
    loops = trainer_contestants
    every = [
        Match(REPLICATED, ("DistributedDataParallel", loops.data_parallel)),
        Match(
            {"ZeRO 1": _course(zero_redundancy=1)},
            ("ZeroRedundancyOptimizer", loops.zero_redundancy),
        ),
        Match(
            {"ZeRO 2": _course(zero_redundancy=2)},
            ("fully_shard, kept whole", partial(loops.sharded, is_freed=False)),
        ),
        Match(FREED, ("fully_shard", partial(loops.sharded, is_freed=True))),
    ]
    if ranks > 1:
        stages = {"pipeline": _course(parallelism={"pp": ranks})}
        every.append(Match(stages, None if model == "gpt" else ("1F1B", loops.pipeline)))
        if not model.startswith("resnet"):
            split = {"tensor": _course(parallelism={"tp": ranks})}
            every.append(Match(split, ("ColwiseParallel", loops.tensor_parallel)))
        every.append(Match({"server": _course(communication_pattern="parameter_server")}, None))
    return every


def matches_of(names: Sequence[str], ranks: int, model: str) -> list[Match]:
    """Return the matches, limited to the named ways to run the trainer if any are named.

    Raises:
        ConfigError: A name is unknown; the message lists the known ones.
    """
    every = matches(ranks, model)
    known = [name for match in every for name in match.ours]
    for name in names:
        if name not in known:
            raise ConfigError(f"no way {name!r} here: use {', '.join(known)}")
    wanted = names or known
    kept = [
        Match({name: keys for name, keys in match.ours.items() if name in wanted}, match.theirs)
        for match in every
    ]
    return [match for match in kept if match.ours]


def print_table(
    ranks: int,
    repeats: int,
    impl: str,
    sizes: Sizes,
    folder: Path | None = None,
    only: Sequence[str] = (),
) -> None:
    """Let the trainer and torch's loops take turns; print and save their images/s or tokens/s.

    Args:
        ranks: Number of ranks; on device "cuda", each has its own GPU, and NCCL is used.
        repeats: Number of rounds.
        impl: Lessons that the trainer uses, "solution" or "mine".
        sizes: Model and data.
        folder: Folder for a JSON file with all figures; None to save nothing.
        only: Ways to run the trainer, by their names in the table; all by default.

    Raises:
        NotThereError: There are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside the course's folder.
        ConfigError: The trainer cannot train with these sizes.
        LaunchError: A rank failed, or ours and its rival reach different losses.
    """
    chosen.check_solutions()  # the trainer itself is one of the solutions
    measured: dict[str, dict[str, Any]] = {}
    wanted = matches_of(only, ranks, sizes.model)
    for place, match in enumerate(wanted, start=1):
        rival = f", beside {match.theirs[0]}" if match.theirs else ""
        print(f"{place} of {len(wanted)}: {', '.join(match.ours)}{rival}", file=sys.stderr)
        measured |= _measure(match, ranks, repeats, impl, sizes)
    has_mfu = any(row["ours"]["mfu"] is not None for row in measured.values())
    unit = "tokens" if sizes.is_language else "images"
    headings = [heading.format(unit=unit) for heading in HEADINGS[: None if has_mfu else 5]]
    harness.print_table(
        sizes.title(ranks),
        headings,
        [_cells(name, row)[: len(headings)] for name, row in measured.items()],
        WHOSE[impl],
        NOTES.format(steps=sizes.steps, repeats=repeats, unit=unit),
        texts=(0, 2),
        box=None,
        pad_edge=False,
    )
    arguments = {"ranks": ranks, "repeats": repeats, "impl": impl, **sizes._asdict()}
    results = {"title": sizes.title(ranks), "arguments": arguments, "measured": measured}
    harness.save(folder, "trainer", results)


def _measure(
    match: Match, ranks: int, repeats: int, impl: str, sizes: Sizes
) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: sizes.config(Path(folder) / str(place), keys)
            for place, (name, keys) in enumerate(match.ours.items())
        }
        lessons_of = {name: find_lessons(impl, config) for name, config in configs.items()}
        backend = "nccl" if sizes.device == "cuda" else "gloo"
        arguments = (configs, lessons_of, match.theirs, sizes.steps, repeats)
        speeds, *_ = launch.run(
            measure_on_rank, ranks, *arguments, backend=backend, timeout_s=HOUR_S
        )
    rival = match.theirs[0] if match.theirs else None
    return {name: compared(speeds[name], rival, speeds.get(rival)) for name in configs}


Speed = dict[str, Any]  # per_s, images or tokens by round; mfu, or None without a known peak


def compared(ours: Speed, rival: str | None, theirs: Speed | None) -> dict[str, Any]:
    """Return a row's figures, with the ratio of medians and the quartiles of the rounds' ratios."""
    row = {"ours": ours, "rival": rival, "theirs": theirs, "ratio": None, "ratios": None}
    if theirs is None:
        return row
    rounds = zip(ours["per_s"], theirs["per_s"], strict=True)
    return {
        **row,
        "ratio": median(ours["per_s"]) / median(theirs["per_s"]),
        "ratios": harness.quartiles([mine / rivals for mine, rivals in rounds]),
    }


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    ratios = row["ratios"]
    ratio = f"{row['ratio']:.3f} ({ratios['q1']:.2f}–{ratios['q3']:.2f})" if ratios else ""
    speeds = [row["ours"], row["theirs"]]
    ours, theirs = (f"{median(speed['per_s']):,.0f}" if speed else "" for speed in speeds)
    mfus = (f"{speed['mfu']:.1%}" if speed and speed["mfu"] is not None else "" for speed in speeds)
    return [name, ours, row["rival"] or "", theirs, ratio, *mfus]


# Code that runs on every rank


def measure_on_rank(
    configs: Mapping[str, Config],
    lessons_of: Mapping[str, Lessons],
    rival: Rival | None,
    steps: int,
    repeats: int,
) -> dict[str | None, Speed]:
    """Let some ways to run the trainer and their rival take turns; return the speed of each.

    Raises:
        ValueError: The mean losses of the first steps differ too much.
    """
    device = torch.device(launch.context().device)
    terminal = sys.stderr  # kept for progress reports, as trainers redirect standard error
    with ExitStack() as stack:
        contestants: dict[str, Train] = {}
        for name, config in configs.items():
            setting = Setting(config, lessons_of[name], device)
            contestants[name] = stack.enter_context(trainer_contestants.trainer(setting))
        if rival:
            contestants[rival[0]] = rival[1](setting)
        # These first steps also warm up.
        check({name: _mean(train(steps)) for name, train in contestants.items()})
        rounds = {name: partial(_finish, train, steps) for name, train in contestants.items()}
        report = partial(_report, terminal, repeats)
        seconds = harness.in_turns(rounds, repeats, harness.together, report)
        slowest = harness.of_all_ranks(seconds.to(lessons.given_4.group_device())).cpu()
        mfu_of_1 = _mfu_of_a_prediction(setting)
    config = setting.config
    rates = (steps * config.batch_size * config.predictions_per_sample / slowest).tolist()
    return {
        name: {"per_s": rate, "mfu": mfu_of_1 and mfu_of_1 * median(rate)}
        for name, rate in zip(contestants, rates, strict=True)
    }


def _finish(train: Train, steps: int) -> None:
    train(steps)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _report(terminal: TextIO, repeats: int, number: int, seconds: float) -> None:
    if dist.get_rank() == 0:
        print(f"round {number} of {repeats}: {seconds:.0f} s", file=terminal, flush=True)


def _mfu_of_a_prediction(setting: Setting) -> float | None:
    """Return the fraction of all ranks' peak FLOP/s that one image or token per second needs."""
    if setting.device.type != "cuda":
        return None
    costs = measure(setting.model(), setting.config, setting.lessons)
    flops = costs.flops_per_sample / setting.config.predictions_per_sample
    return flops / (costs.peak_flops_per_s * dist.get_world_size())


def _mean(losses: Losses) -> float:
    """Return the mean loss over the samples of all ranks."""
    sums = torch.tensor([float(losses.total), losses.num_samples], dtype=torch.float64)
    sums = sums.to(lessons.given_4.group_device())
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def check(means: Mapping[str, float]) -> None:
    """Check that the mean losses of all contestants agree within LARGEST_DIFFERENCE.

    Raises:
        ValueError: One of the mean losses differs by more.
    """
    expected = [*means.values()][-1]
    for name, mean in means.items():
        if not abs(mean - expected) <= LARGEST_DIFFERENCE * expected:
            raise ValueError(
                f"they do not learn the same: in the first steps, the mean loss of {name} is "
                f"{mean:.4g}, and another's is {expected:.4g}"
            )
