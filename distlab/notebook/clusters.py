"""The ranks that ``%cluster`` begins, by its options."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import IPython

from distlab.notebook.simulated import SimulatedRanks
from distlab.notebook.world import World
from distlab.sim import configured
from distlab.util.text import joined

MAX_RANKS = 1024
ALONE = {"help", "off", "why", "lanes"}
SIZES = {"size", "ranks", "cluster"}  # options that say which ranks there are
OF_PROCESSES = {"size", "ranks", "world"}
T = TypeVar("T")


def begun(args: Any, given: Collection[str]) -> World:
    """Begin ranks, simulated or real.

    Args:
        args: Options of ``%cluster``.
        given: Names of those that the user has given.

    Raises:
        ValueError: An option is wrong.
    """
    if alone := [name for name in given if name in ALONE]:
        raise ValueError(f"--{alone[0]} stands alone: give no other option")
    if SIZES.isdisjoint(given):
        raise ValueError("say how many ranks, or a preset: %cluster 8, or %cluster dgx-h100")
    numbers = [word for word in args.size if word.lstrip("-").isdigit()]
    presets = [word.replace("_", "-") for word in args.size if word not in numbers]
    num_ranks = _only("number of ranks", [*map(int, numbers), args.ranks])
    preset = _only("cluster", [*presets, args.cluster])
    if num_ranks is not None and not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"a cluster has 1 to {MAX_RANKS} ranks, not {num_ranks}")
    if args.world != "sim":
        others = [f"--{name.replace('_', '-')}" for name in given if name not in OF_PROCESSES]
        return _processes(num_ranks, args.world, [*presets, *others])
    return _simulated(num_ranks, preset or configured.PRESET, args)


def _only(kind: str, values: Sequence[T | None]) -> T | None:
    given = [value for value in values if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one {kind}, not {joined([*map(str, given)])}")
    return given[0] if given else None


def _simulated(num_ranks: int | None, preset: str, args: Any) -> World:
    cluster, num_ranks = configured.world(preset, args.nodes, num_ranks)
    options = configured.options(
        cluster,
        num_ranks,
        fault=args.fault,
        memory_gib=args.memory_gib,
        host_cost=args.host_cost,
        no_devices=args.no_devices,
        semantics=args.semantics,
        overlap_cost=args.overlap_cost,
        p2p_order=args.p2p_order,
        seed=args.seed,
        algorithm=args.algorithm,
        eager_bytes=args.eager_bytes,
        is_strict=args.strict,
        is_sanitized=args.sanitize,
        given=(str(Path(__file__).parent), str(Path(IPython.__file__).parent)),
    )
    return SimulatedRanks(num_ranks, cluster, options)


def _processes(num_ranks: int | None, backend: str, of_simulated: Sequence[str]) -> World:
    """Begin processes; refuse options that only simulated ranks have."""
    if of_simulated:
        raise ValueError(
            f"real processes have no {joined(of_simulated)}: leave out --world {backend}"
        )
    assert num_ranks is not None  # else there would be a preset
    try:
        from distlab.notebook.engines import Engines
    except ImportError:
        raise ValueError("real ranks need ipyparallel: pip install -e '.[notebook]'") from None
    return Engines(num_ranks, backend)
