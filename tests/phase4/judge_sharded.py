"""Judges task 4.3: any number of ranks loads, crashes leave whole checkpoints, ranks end alike."""

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Options
from distlab.util.text import joined
from judging.checks import check_refused, short
from judging.expect import expect, expect_on_all_ranks, results_in_group
from phase4 import sharded as b
from phase4.sharded import Broken, Cut, Slices
from phase4.store_contract import StoreContract, check_load
from phase4.stores import DAMAGES, Damage, Plan, name_of

STUCK = (
    "A rank that fails must say so before it raises: the others wait for it. Gather on all ranks "
    "what came of each step, errors too, and then raise on all of them."
)
DTYPES = ("float32", "bfloat16", "int64", "float64")


def _run(grade: Grade, body: Callable[..., Any], num_ranks: int, *args: object) -> Run:
    """Run a body on ranks with a root folder for all of them."""
    with TemporaryDirectory(prefix="distlab-") as root:
        return grade.run(body, num_ranks, root, *args, if_stuck=STUCK)


def _cuts(grade: Grade, tensors: dict[str, tuple[int, str]], num_ranks: int) -> list[list[Cut]]:
    """Cut every tensor at random places; ranks with nothing of a tensor may not name it.

    Of every other tensor, parts are on several ranks. Of the first, the last rank names nothing.
    """
    by_rank: list[list[Cut]] = [[] for _ in range(num_ranks)]
    for place, (name, (numel, _)) in enumerate(tensors.items()):
        inner = sorted(grade.random.randint(0, numel) for _ in range(num_ranks - 1))
        bounds = [0, *inner, numel]
        if place == 0 and num_ranks > 1:
            bounds[-2] = numel
        for rank, cuts in enumerate(by_rank):
            start, stop = bounds[rank : rank + 2]
            if start < stop or place == 0 or grade.random.random() < 0.5:
                cuts.append((name, grade.random.randint(0, start) if place % 2 else start, stop))
    return by_rank


def _slices(grade: Grade, num_ranks: int) -> Slices:
    tensors = {f"layer.{i}": (grade.random.randint(5, 60), d) for i, d in enumerate(DTYPES)}
    return Slices(tensors, _cuts(grade, tensors, num_ranks))


def _quarters(numel: int) -> Slices:
    cuts: list[list[Cut]] = [[("w", r * numel // 4, (r + 1) * numel // 4)] for r in range(4)]
    return Slices({"w": (numel, "float32")}, cuts)


# Any number of ranks


@task("4.3", real=True)
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 3), (3, 2)])
def test_any_number_of_ranks_loads(grade: Grade, num_writers: int, num_readers: int) -> None:
    slices = _slices(grade, num_writers)
    wanted = _cuts(grade, dict(slices.tensors), num_readers)
    run = _run(grade, b.save_and_load, max(num_writers, num_readers), slices, wanted)
    where = f"saved on {num_writers} ranks, loaded on {num_readers}: rank"
    for rank, facts in enumerate(run.results[:num_writers]):
        expect(
            f"{where} {rank}: the path that save_sharded returns, and whether it exists then",
            *(facts["saved"], [name_of(2), True]),
            "No rank returns before rank 0 has renamed the folder.",
        )
        check(facts["unchanged"], f"{where} {rank}: save_sharded changed its shards.")
    for rank, facts in enumerate(run.results[:num_readers]):
        expect(f"{where} {rank}: step and path", facts["loaded"], [2, name_of(2)], "The newest.")
        expect(
            *(f"{where} {rank}: the elements that are loaded", facts["values"], facts["right"]),
            "A rank's slice may begin inside one file and end in another, with any number of "
            "ranks, and what it wants may lie in several files.",
        )


@task("4.3")
def test_shards_inside_a_group(grade: Grade) -> None:
    with TemporaryDirectory(prefix="distlab-") as root:
        args = root, _slices(grade, 3), "save_all", (1,), Plan(0)
        results = results_in_group(grade, b.run, *args)
    for rank, facts in enumerate(results):
        check_load(facts, 1, f"inside a group, rank {rank}")


@task("4.3")
def test_all_go_by_the_list_of_rank_0(grade: Grade) -> None:
    run = _run(grade, b.load_with_other_lists, 3, _slices(grade, 3))
    for rank, facts in enumerate(run.results):
        check_load(
            *(facts, 2),
            "rank 0 sees the steps 1 and 2, and the file system shows the others an old list, with "
            f"a step 3 too: on rank {rank}",
            "Let rank 0 list the folder, and broadcast what it has found.",
        )


# Bytes, memory and reading


@task("4.3")
def test_no_element_travels(grade: Grade) -> None:
    numel = 400_000
    run, num_bytes = _run(grade, b.save_large, 4, _quarters(numel)), 4 * numel
    most = max(run.bytes_sent)
    check(
        most < num_bytes / 40,
        f"a rank sent {most:,.0f} bytes, where its shard has {num_bytes // 4:,}: each rank writes "
        "its own file, and only names, sizes and hashes travel.",
    )
    check(
        run.results[0] < 1.1 * num_bytes,
        f"the checkpoint has {run.results[0]:,} bytes for {num_bytes:,} bytes of elements. A "
        "slice is a view: torch.save writes the whole storage behind it, unless it is cloned.",
    )


@task("4.3")
def test_a_save_takes_memory_for_one_further_copy(grade: Grade) -> None:
    with TemporaryDirectory(prefix="distlab-") as root:
        run = grade.run(b.memory_of_save, 1, root, options=Options(has_devices=True))
    held = run.results[0] + run.peak_bytes[0] - b.NUM_BYTES
    check(
        held < 1.5 * b.NUM_BYTES,
        f"shards of {b.NUM_BYTES:,} bytes were saved, and that took {held:,} bytes more: there "
        "is memory for one further copy. A tensor's bytes can be written from where they lie: "
        "values.view(torch.uint8).numpy().",
    )


WHO_READS = {
    "save": "it is checked while another is saved, once in all",
    "load nothing": "nobody wants anything, so it is checked and no more",
    "load": "rank 2 wants 5 elements of the first file, after the check",
}


@task("4.3")
def test_each_file_is_read_by_one_rank_and_by_who_wants_it(grade: Grade) -> None:
    wanted: list[list[Cut]] = [[], [], [("w", 5, 10)], []]
    run = _run(grade, b.who_reads, 4, _quarters(4 * b.LARGE_BYTES), wanted)
    for what, reads in run.results[0].items():
        more = what == "load"
        of_ranks = [sum(rank == reader for reader, _ in reads) for rank in range(4)]
        check(
            sum(of_ranks) <= 4 + more and max(of_ranks) <= 2 + more,
            f"a checkpoint of 4 ranks, each with a file of its own; {WHO_READS[what]}. The ranks 0 "
            f"to 3 have read {short(of_ranks)} of these files. Let each rank check about a quarter "
            "of them and tell the others, and then read what it wants alone.",
        )


# Crashes, broken disks and damage


def _run_stores(grade: Grade, body: str, *args: object) -> list[Any]:
    small = {"w": (12, "float32")}
    slices = Slices(small, _cuts(grade, small, 3)) if body == "crash" else _slices(grade, 3)
    results: list[Any] = _run(grade, b.run, 3, slices, body, *args).results
    return results


SHARDS = StoreContract(
    "4.3",
    "shards",
    run=_run_stores,
    crashes={
        f"a third step where {keep} stay": Plan(3, there=(1, 2), keep=keep) for keep in (2, 3)
    },
    kept={
        "a damaged one among them": (
            *((4,), Plan(0, there=(1, 2, 3), damaged=(3,), keep=2)),
            [(2, 3, 4)],
        ),
        "an earlier step than others": ((3,), Plan(0, there=(1, 5, 6), keep=2), [(3, 5, 6)]),
        "a damaged one is replaced": ((2,), Plan(0, there=(1, 2), damaged=(2,), keep=2), [(1, 2)]),
        "a crash of more ranks has left a folder": (
            *((3,), Plan(0, there=(1, 2), leftovers=(".step-00000003.partial",))),
            [(1, 2, 3)],
        ),
    },
    damages=lambda _: [Damage(kind, which) for kind in [*DAMAGES][:4] for which in range(5)],
    is_one_process=False,
    advice="Each rank syncs its own file before it reports; then rank 0 writes and syncs the "
    "manifest, syncs the folder, renames it, and syncs the folder around it; no rank returns "
    "before: the disk of rank 0 may be slow.",
)
globals().update(SHARDS.tests())


FULL, UNREADABLE = (28, "No space left on device"), (5, "Input/output error")
BROKEN = {
    "rank 0 has a full disk": Broken({0: FULL}),
    "rank 2 has a full disk": Broken({2: FULL}),
    "ranks 1 and 2 can't write": Broken({1: FULL, 2: UNREADABLE}),
    "rank 0 can't sync the run's folder": Broken({0: UNREADABLE}, is_late=True),
}


@task("4.3")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_disk_is_an_error_on_all_ranks(grade: Grade, what: str) -> None:
    broken = BROKEN[what]
    names = [f"rank {rank}" for rank in broken.reasons]
    names += [reason for _, reason in broken.reasons.values()]
    run = _run(grade, b.save_on_a_broken_disk, 3, _slices(grade, 3), broken)
    for rank, (text, left) in enumerate(run.results):
        check(
            text and all(name in text for name in names),
            f"{what}; rank {rank} should raise an OSError that says {joined(names)}; it "
            f"raises {short(text) if text else 'none'}.",
        )
        expect(
            f"{what}; when rank {rank} raises, the folder",
            *(left, [name_of(1)]),
            "What was written is removed first, whatever its name is by then.",
        )


LACKS = {  # tensor, length and dtype, wanted slice, and texts; the error has one of these
    "w[2:12] of which w[5:9] was never saved": ("w", (20, "float32"), 2, 12, ["[5:9]"]),
    "w[9:20] of which w[16:20] was never saved": ("w", (20, "float32"), 9, 20, ["[16:20]"]),
    "c[1:3] of which nothing was saved": ("c", (4, "float32"), 1, 3, ["[1:3]"]),
    "w[9:16], saved in another dtype": ("w", (20, "float64"), 9, 16, ["float32", "float64"]),
    "w[9:16] of 24 elements, saved of 20": ("w", (24, "float32"), 9, 16, ["20", "24"]),
}


@task("4.3")
@pytest.mark.parametrize("what", LACKS)
def test_what_a_checkpoint_lacks_is_named(grade: Grade, what: str) -> None:
    tensor, kind, start, stop, names = LACKS[what]
    tensors = {"w": (20, "float32"), "b": (4, "float32")}
    slices = Slices(tensors, [[("w", 0, 5)], [("w", 9, 16), ("b", 0, 4)], [("w", 5, 5)]])
    wanted = Slices({**tensors, tensor: kind}, [[("b", 0, 4)], [(tensor, start, stop)], []])
    results = _run(grade, b.load_what_is_missing, 3, slices, wanted).results
    refusals = [facts["refusal"] for facts in results]
    named = [name for name in names if name in refusals[0]["text"]]
    check_refused(refusals, what, tensor, (named or names)[0])
    unchanged = [facts["unchanged"] for facts in results]
    expect_on_all_ranks(f"{what} is refused: whether wanted is unchanged", unchanged, True)
