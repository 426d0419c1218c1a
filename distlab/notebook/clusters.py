"""The ranks that ``%cluster`` begins, by its options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import IPython

from distlab.notebook.simulated import SimulatedRanks
from distlab.notebook.world import World
from distlab.sim import configured
from distlab.util.text import joined

MAX_RANKS = 1024


def begun(args: Any, defaults: Any) -> World:
    """Begin ranks, simulated or real.

    Args:
        args: Options of ``%cluster``.
        defaults: Values of options that were not given.

    Raises:
        ValueError: An option is wrong.
    """
    numbers = [word for word in args.size if word.lstrip("-").isdigit()]
    presets = [word for word in args.size if word not in numbers]
    num_ranks, preset = args.ranks, args.cluster
    if numbers:
        num_ranks = int(_only([*numbers, *_given(num_ranks)], "numbers of ranks"))
    if presets:
        preset = _only([*presets, *_given(preset)], "clusters").replace("_", "-")
    if num_ranks is not None and not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"a cluster has 1 to {MAX_RANKS} ranks, not {num_ranks}")
    if args.world != "sim":
        return _processes(num_ranks, args, defaults)
    return _simulated(num_ranks, preset or configured.PRESET, args)


def _given(option: Any) -> list[str]:
    return [] if option is None else [str(option)]


def _only(words: Sequence[str], kind: str) -> str:
    if len(words) > 1:
        raise ValueError(f"{joined(words)} are two {kind}: give one, as in %cluster 8")
    return words[0]


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


def _processes(num_ranks: int | None, args: Any, defaults: Any) -> World:
    """Begin processes; refuse options that only simulated ranks have."""
    of_both = {"size", "world", "ranks"}
    given = [name for name, value in vars(args).items() if value != getattr(defaults, name)]
    if others := [f"--{name.replace('_', '-')}" for name in given if name not in of_both]:
        raise ValueError(f"real processes have no {joined(others)}: leave out --world {args.world}")
    if num_ranks is None:
        raise ValueError(f"write the number of processes: %cluster 4 --world {args.world}")
    try:
        from distlab.notebook.engines import Engines
    except ImportError:
        raise ValueError("real ranks need ipyparallel: pip install -e '.[notebook]'") from None
    return Engines(num_ranks, args.world)
