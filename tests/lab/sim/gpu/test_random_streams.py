"""Random programs with streams have gloo's values; each order that they need is missed."""

import random
import re
from collections import defaultdict
from functools import partial

import pytest
from random_gpu_programs import RandomProgram, run

from distlab.sim import Options, simulate

NUM_PROGRAMS = 200
NUM_WORLDS = 5  # programs that share a world: a world for each would take longer than they do
NCCL = Options(semantics="nccl", has_events=False)
Pair = tuple[int, int]  # lines of a program


def programs_of(world: int) -> dict[int, list[RandomProgram]]:
    """Return the programs of a world, by their number of ranks."""
    by_size: dict[int, list[RandomProgram]] = defaultdict(list)
    for seed in range(world, NUM_PROGRAMS, NUM_WORLDS):
        program = RandomProgram(seed)
        by_size[program.num_ranks].append(program)
    return by_size


def pairs_in(wrong: list[str]) -> dict[str, set[Pair]]:
    """Return the pairs of lines in findings, by program."""
    pairs: dict[str, set[Pair]] = defaultdict(set)
    for finding in wrong:
        places = re.findall(r"(program_\d+\.py):(\d+)", finding)
        (file, one), (other_file, other) = places[:2]  # the remedy may name more
        assert file == other_file
        pairs[file].add((int(other), int(one)))
    return pairs


@pytest.mark.parametrize("world", range(NUM_WORLDS))
def test_right_programs_have_the_values_of_gloo_and_no_findings(world: int) -> None:
    for num_ranks, programs in programs_of(world).items():
        on_cpu = {p.file: p.code(on_gpu=False) for p in programs}
        on_gpu = {p.file: p.code(on_gpu=True) for p in programs}
        expected = simulate(partial(run, on_cpu, on_gpu=False), num_ranks)
        ran = simulate(
            partial(run, on_gpu, on_gpu=True), num_ranks, cluster="dgx-h100", options=NCCL
        )
        assert ran.gpu_time is not None
        assert ran.gpu_time.wrong == []
        assert ran.results == expected.results


@pytest.mark.parametrize("world", range(NUM_WORLDS))
def test_a_removed_order_is_reported_at_the_two_lines_that_needed_it(world: int) -> None:
    for num_ranks, programs in programs_of(world).items():
        needed = {p: p.needed_orders() for p in programs}
        draw = random.Random(world)
        removed = {p.file: (p, draw.choice(orders)) for p, orders in needed.items() if orders}
        assert len(removed) > 0.8 * len(programs)
        codes = {file: p.code(on_gpu=True, without=line) for file, (p, line) in removed.items()}
        ran = simulate(
            partial(run, codes, on_gpu=True), num_ranks, cluster="dgx-h100", options=NCCL
        )
        assert ran.gpu_time is not None
        found = pairs_in(ran.gpu_time.wrong)
        for file, (program, line) in removed.items():
            assert program.reasons[line] in found[file], f"{file}:{line}: {found[file]}"
            assert found[file] <= program.hazards_without(line), f"{file}:{line}"
