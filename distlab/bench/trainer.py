"""The production trainer beside plain loops with what torch has for each of its strategies."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from distlab import chosen, launch
from distlab.bench import saving
from distlab.bench.rivals import WHOSE
from distlab.bench.trainer_measured import Compared, Rival, Speed, measure_on_rank
from distlab.bench.trainer_rivals import (
    data_parallel,
    pipeline,
    sharded,
    tensor_parallel,
    zero_redundancy,
)
from distlab.production.config import Config, make_config
from distlab.production.errors import ConfigError
from distlab.production.lessons import find_lessons
from distlab.util.text import counted

HOUR_S = 3600.0
COMMON = {
    "data": "synthetic",
    "augment": "none",
    "num_workers": 0,
    "epochs": 10**6,
    "optimizer": "adamw",
    "lr": 1e-3,
    "warmup_epochs": 0,
    "schedule": "constant",
    "save_every": 10**9,  # a plain loop saves nothing, either
    "heartbeat_timeout_s": HOUR_S,  # each waits while the others train
}
NOTES = """\
Ours: the trainer with its loader, telemetry, heartbeats and agreement to stop, {steps} steps at a
time. Torch's: a plain loop, with the same model, batches, loader and optimizer, and none of these.
All in one line of the table train in turns; images/s are of all ranks, medians of {repeats} rounds.
Ratio: ours over torch's, of the medians; in parentheses, between which half of the rounds have it.
torch has no parameter server."""


class Sizes(NamedTuple):
    """What is trained; the transformer is a small ViT, and the data are synthetic."""

    model: str = "transformer"
    image_size: int = 16
    batch_size: int = 64
    precision: str = "fp32"
    device: str = "cpu"
    steps: int = 16

    def config(self, run_dir: Path, strategy: Mapping[str, Any]) -> Config:
        """Return what ours trains with."""
        sizes = {name: value for name, value in self._asdict().items() if name != "steps"}
        own = {"channels_last": self.device == "cuda", "run_dir": run_dir}
        return make_config({**COMMON, **sizes, **own, **strategy}, "distlab bench trainer")


class Match(NamedTuple):
    """Ways of the trainer, by name, which train in turns with a loop of torch's, if it has one."""

    ours: Mapping[str, Mapping[str, Any]]  # keys of the configuration
    theirs: Rival | None

    def of(self, names: Container[str]) -> Match:
        """Return those of ours which have these names, and the same rival."""
        return Match({name: self.ours[name] for name in self.ours if name in names}, self.theirs)


def _course(**keys: Any) -> dict[str, Any]:
    return {"strategy": "course", **keys}


PATTERNS = ("native", "ring", "tree", "hierarchical")
REPLICATED = {
    "ddp": {"strategy": "ddp"},
    **{name: _course(communication_pattern=name) for name in PATTERNS},
}
FREED = {"fsdp": {"strategy": "fsdp"}, "ZeRO 3": _course(zero_redundancy=3)}


def matches(ranks: int, model: str) -> list[Match]:
    """Return who trains beside whom; what needs several ranks, or a ViT, only where it can be."""
    found = [
        Match(REPLICATED, ("DistributedDataParallel", data_parallel)),
        Match(
            {"ZeRO 1": _course(zero_redundancy=1)},
            ("ZeroRedundancyOptimizer", zero_redundancy),
        ),
        Match(
            {"ZeRO 2": _course(zero_redundancy=2)},
            ("fully_shard, kept whole", partial(sharded, is_freed=False)),
        ),
        Match(FREED, ("fully_shard", partial(sharded, is_freed=True))),
    ]
    if ranks > 1:
        found.append(Match({"pipeline": _course(pipeline_parallelism=ranks)}, ("1F1B", pipeline)))
        if not model.startswith("resnet"):
            split = {"tensor": _course(tensor_parallelism=ranks)}
            found.append(Match(split, ("ColwiseParallel", tensor_parallel)))
        server = {"server": _course(communication_pattern="parameter_server")}
        found.append(Match(server, None))
    return found


def matches_of(names: Sequence[str], ranks: int, model: str) -> list[Match]:
    """Return the matches of these ways of the trainer; without names, all.

    Raises:
        ConfigError: there is no such way here; it names those that there are.
    """
    found = matches(ranks, model)
    known = [name for match in found for name in match.ours]
    for name in names:
        if name not in known:
            raise ConfigError(f"no way {name!r} here: use {', '.join(known)}")
    wanted = [match.of(names or known) for match in found]
    return [match for match in wanted if match.ours]


def print_table(
    ranks: int,
    repeats: int,
    impl: str,
    sizes: Sizes,
    folder: Path | None = None,
    only: Sequence[str] = (),
) -> None:
    """Let the trainer and torch's loops train in turns; print, and if wanted save, images/s.

    Args:
        ranks: one or more; with ``device`` cuda, each has a GPU of its own, and talks by NCCL.
        repeats: rounds.
        impl: "solution" or "mine": whose lessons the trainer uses.
        folder: where to save all figures.
        only: the ways of the trainer to measure, as the table calls them; all by default.

    Raises:
        NotThereError: there are no solutions here, or one of the functions is a TODO.
        LearnerError: ``impl`` is "mine" outside of the course's folder.
        ConfigError: the trainer cannot train so.
        LaunchError: a rank failed, or ours learns something else than its rival.
    """
    chosen.check_solutions()  # the trainer itself is one of them
    compared: dict[str, Compared] = {}
    wanted = matches_of(only, ranks, sizes.model)
    for place, match in enumerate(wanted, start=1):
        rival = f", beside {match.theirs[0]}" if match.theirs else ""
        print(f"{place} of {len(wanted)}: {', '.join(match.ours)}{rival}", file=sys.stderr)
        compared |= _measure(match, ranks, repeats, impl, sizes)
    title = (
        f"{sizes.model}, {sizes.image_size} x {sizes.image_size}, batches of {sizes.batch_size}, "
        f"{sizes.precision}, {counted(ranks, f'{sizes.device} rank')}"
    )
    Console().print(_table(title, compared))
    print(WHOSE[impl], NOTES.format(steps=sizes.steps, repeats=repeats), sep="\n")
    if folder is not None:
        arguments = {"ranks": ranks, "repeats": repeats, "impl": impl, **sizes._asdict()}
        saving.save(
            folder, "trainer", {"title": title, "arguments": arguments, "measured": _rows(compared)}
        )


def _measure(
    match: Match, ranks: int, repeats: int, impl: str, sizes: Sizes
) -> dict[str, Compared]:
    with tempfile.TemporaryDirectory() as folder:
        configs = {
            name: sizes.config(Path(folder) / str(place), keys)
            for place, (name, keys) in enumerate(match.ours.items())
        }
        lessons = {name: find_lessons(impl, config) for name, config in configs.items()}
        backend = "nccl" if sizes.device == "cuda" else "gloo"
        arguments = (configs, lessons, match.theirs, sizes.steps, repeats)
        speeds, *_ = launch.run(
            measure_on_rank, ranks, *arguments, backend=backend, timeout_s=HOUR_S
        )
    rival = match.theirs[0] if match.theirs else None
    return {name: Compared(speeds[name], rival, speeds.get(rival)) for name in configs}


HEADINGS = ("ours", "images/s", "torch's", "images/s", "ratio")


def _table(title: str, compared: Mapping[str, Compared]) -> Table:
    """Lay out a line for each way of the trainer; the MFU of both, where it is known."""
    has_mfu = any(one.ours.mfu is not None for one in compared.values())
    table = Table(title=title, box=None, pad_edge=False)
    for heading in (*HEADINGS, *(("MFU", "torch's") if has_mfu else ())):
        is_text = heading in ("ours", "torch's")
        table.add_column(heading, no_wrap=True, justify="left" if is_text else "right")
    for name, one in compared.items():
        mfus = (_mfu(one.ours), _mfu(one.theirs)) if has_mfu else ()
        table.add_row(name, _rate(one.ours), one.rival or "", _rate(one.theirs), _ratio(one), *mfus)
    return table


def _rate(speed: Speed | None) -> str:
    return f"{speed.median:,.0f}" if speed else ""


def _mfu(speed: Speed | None) -> str:
    return f"{speed.mfu:.1%}" if speed and speed.mfu is not None else ""


def _ratio(one: Compared) -> str:
    if one.ratios is None:
        return ""
    return f"{one.ratio:.3f} ({one.ratios['q1']:.2f}–{one.ratios['q3']:.2f})"


def _rows(compared: Mapping[str, Compared]) -> dict[str, object]:
    """Return all that was measured, for JSON."""
    return {
        name: {**asdict(one), "ratio": one.ratio, "ratios": one.ratios}
        for name, one in compared.items()
    }
