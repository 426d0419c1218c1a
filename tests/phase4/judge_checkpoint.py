"""Judges tasks 4.1, 4.3 and 4.4: crashes, damage, broken disks, any number of ranks, waiting."""

import errno
import os
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from distlab.grade import Grade, Run, check, check_cost, task
from distlab.sim import Options
from distlab.util.text import joined
from judging.checks import ON_CPU, check_refused, short
from judging.expect import expect, expect_on_all_ranks, results_in_group
from phase4 import checkpoints as b
from phase4.checkpoints import Broken, Cut, Slices
from phase4.store_contract import StoreContract, check_closed, check_load
from phase4.stores import DAMAGES, Damage, Facts, Plan, draw_damages, name_of

# Task 4.1: crashes at every moment, damage, old checkpoints, and disks that fail


def _call(grade: Grade, body: Any, *args: object) -> Any:
    with TemporaryDirectory(prefix="distlab-") as root:
        return grade.call(body, root, *args)


CHECKPOINTS = StoreContract(
    "4.1",
    "checkpoints",
    run=lambda grade, *args: [_call(grade, b.run, *args)],
    crashes={
        "a fourth step where three stay": Plan(4, there=(1, 2, 3)),
        "a step where one stays": Plan(7, there=(5,), keep=1),
        "the first step of a run whose folder is missing": Plan(1, is_made=False),
        "a step whose damaged checkpoint is there": Plan(3, there=(1, 2, 3), damaged=(3,), keep=9),
        "a step after a kill between a renaming and its sync": Plan(
            4, there=(1, 2, 3), renamed=(1,)
        ),
    },
    kept={
        "damaged ones among them": (
            *((5, 6), Plan(0, there=(0, 1, 2, 3, 4), damaged=(2, 3))),
            [(1, 2, 3, 4, 5), (4, 5, 6)],
        ),
        "earlier and later steps than others": (
            *((3, 99_999_999), Plan(0, there=(1, 9, 10), keep=2)),
            [(3, 9, 10), (10, 99_999_999)],
        ),
        "one stays": ((4,), Plan(0, there=(1, 2), keep=1), [(4,)]),
        "damage has sent the run back": (
            *((2,), Plan(0, there=(1, 3, 4, 5), damaged=(3, 4, 5), keep=2)),
            [(1, 2, 3, 4, 5)],
        ),
        "a damaged one is replaced": ((3,), Plan(0, there=(1, 2, 3), damaged=(3,)), [(1, 2, 3)]),
        "a crash has left folders": (
            *((4,), Plan(0, (1, 2, 3), leftovers=(".step-00000004.partial", ".step-1.removed"))),
            [(2, 3, 4)],
        ),
    },
    damages=partial(draw_damages, num_flips=30),
    is_one_process=True,
    parts={
        "survive_a_kill": "b",
        "survive_a_crash": "c",
        "that_are_newest_and_undamaged_stay": "d",
    },
)
globals().update(CHECKPOINTS.tests())


@task("4.1")
def test_loading_runs_no_code(grade: Grade) -> None:
    check(
        not _call(grade, b.load_code),
        "a checkpoint with an object that opens a file when it is unpickled was loaded, and the "
        "file was made. Load with torch.load(…, weights_only=True).",
    )


# Disks that fail

FULL = {"the disk is full": 0, "the disk fills up": 2000, "the folder can't be made": None}


@task("4.1", part="b")
@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_loses_nothing(grade: Grade, what: str) -> None:
    facts = _call(grade, b.save_where_it_fails, FULL[what])
    _check_failure(facts, what, "" if FULL[what] is None else os.strerror(errno.EFBIG))


@task("4.1", part="c")
def test_a_sync_that_fails_loses_nothing(grade: Grade) -> None:
    for place, facts in enumerate(_call(grade, b.save_where_a_sync_fails), start=1):
        what = f"sync {place} of the save says that the disk is broken"
        _check_failure(facts, what, os.strerror(errno.EIO))


@task("4.1", part="d")
def test_what_was_saved_stays_if_an_old_one_does(grade: Grade) -> None:
    facts = _call(grade, b.save_where_an_old_one_stays)
    check_load(
        *(facts, 3, "step 3 was saved with keep=2, and step 1 could not be removed"),
        f"The folder holds {facts['left']}. Clean up if the save itself fails, not if "
        "something fails after it.",
    )


def _check_failure(facts: Facts, what: str, reason: str) -> None:
    check(
        facts["error"] == "OSError",
        f"{what}: save_checkpoint should raise an OSError; it raises "
        f"{facts['error'] or 'nothing'}. Into a file, torch.save raises a RuntimeError that does "
        "not say why the write failed.",
    )
    check(
        reason in facts["reason"],
        f"{what}: the OSError should say what the system said, {reason!r}; it says "
        f"{facts['reason']!r:.200}. Let it through, or raise yours from it; an error in the "
        "cleanup must not replace it.",
    )
    check(
        facts["same"],
        f"{what}: the checkpoints of steps 1 and 2 should be as before, and nothing else be left; "
        f"the folder holds {facts['left']}. "
        + (
            "Remove old ones only after the new one is durable."
            if facts["lost"]
            else "If a save fails, remove what it has written of its step."
        ),
    )
    check_closed(facts["open"], f"a save that has failed ({what})")


# Task 4.3: any number of ranks, intact checkpoints after crashes, the same error on all ranks

STUCK = (
    "A rank that fails must say so before it raises: the others wait for it. Gather on all ranks "
    "what came of each step, errors too, and then raise on all of them."
)
DTYPES = ("float32", "bfloat16", "int64", "float64")


def _run(
    grade: Grade, body: Callable[..., Any], num_ranks: int, *args: object, if_stuck: str = STUCK
) -> Run:
    """Run a body on ranks that share a root folder."""
    with TemporaryDirectory(prefix="distlab-") as root:
        return grade.run(body, num_ranks, root, *args, if_stuck=if_stuck)


def _cuts(grade: Grade, tensors: dict[str, tuple[int, str]], num_ranks: int) -> list[list[Cut]]:
    """Cut every tensor at random positions; a rank may also list a tensor with an empty slice.

    Slices of every second tensor overlap between ranks. The last rank's slice of the first tensor
    is empty.
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
        results = results_in_group(grade, b.run_shards, *args)
    for rank, facts in enumerate(results):
        check_load(facts, 1, f"inside a group, rank {rank}")


@task("4.3")
def test_all_go_by_the_list_of_rank_0(grade: Grade) -> None:
    run = _run(grade, b.load_with_other_lists, 3, _slices(grade, 3), if_stuck=b.OUTDATED)
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
    check_cost(
        most < num_bytes / 40,
        f"a rank sent {most:,.0f} bytes, where its shard has {num_bytes // 4:,}: each rank writes "
        "its own file, and only names, sizes and hashes travel.",
    )
    check_cost(
        run.results[0] < 1.1 * num_bytes,
        f"the checkpoint has {run.results[0]:,} bytes for {num_bytes:,} bytes of elements. A "
        "slice is a view: torch.save writes the whole storage behind it, unless it is cloned.",
    )


@task("4.3")
def test_a_save_takes_memory_for_one_further_copy(grade: Grade) -> None:
    with TemporaryDirectory(prefix="distlab-") as root:
        run = grade.run(b.memory_of_save, 1, root, options=Options(has_devices=True))
    held = run.results[0] + run.peak_bytes[0] - b.NUM_BYTES
    check_cost(
        held < 1.5 * b.NUM_BYTES,
        f"shards of {b.NUM_BYTES:,} bytes were saved, and that took {held:,} bytes more: there "
        "is memory for one further copy. A tensor's bytes can be written from where they lie: "
        "values.view(torch.uint8).numpy().",
    )


WHO_READS = {
    "save": "another is saved, for which each file may be read once in all",
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
        check_cost(
            sum(of_ranks) <= 4 + more and max(of_ranks) <= 2 + more,
            f"a checkpoint of 4 ranks, each with a file of its own; {WHO_READS[what]}. The ranks 0 "
            f"to 3 have read {short(of_ranks)} of these files. Let each rank check about a quarter "
            "of them and tell the others, and then read what it wants alone.",
        )


# Crashes, broken disks and damage


def _run_stores(grade: Grade, body: str, *args: object) -> list[Any]:
    small = {"w": (12, "float32")}
    slices = Slices(small, _cuts(grade, small, 3)) if body == "crash" else _slices(grade, 3)
    results: list[Any] = _run(grade, b.run_shards, 3, slices, body, *args).results
    return results


SHARDS = StoreContract(
    "4.3",
    "shards",
    run=_run_stores,
    crashes={
        f"a third step where {keep} stay": Plan(3, there=(1, 2), keep=keep) for keep in (2, 3)
    },
    kept={
        "damaged ones among them": (
            *((4,), Plan(0, there=(0, 1, 2, 3), damaged=(2, 3), keep=2)),
            [(1, 2, 3, 4)],
        ),
        "earlier and later steps than others": (
            *((3, 99_999_999), Plan(0, there=(1, 9, 10), keep=2)),
            [(3, 9, 10), (10, 99_999_999)],
        ),
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


FULL_DISK, UNREADABLE = (28, "No space left on device"), (5, "Input/output error")
BROKEN = {
    "rank 0 has a full disk": Broken({0: FULL_DISK}),
    "rank 2 has a full disk": Broken({2: FULL_DISK}),
    "ranks 1 and 2 can't write": Broken({1: FULL_DISK, 2: UNREADABLE}),
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


LACKS = {  # tensor, length and dtype, wanted slice, and texts, one of which the error contains
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


# Task 4.4: how long training waits, the written states, and error reports


@task("4.4")
def test_training_goes_on_during_the_write(grade: Grade) -> None:
    facts = grade.call(b.save_and_change)
    check(
        not facts["waited"],
        "save should return while the write goes on; it has waited for its own write. Start a "
        "thread, and don't join it before the next save, wait or the end of the with statement.",
    )
    check(facts["unchanged"], "save has changed the state, which is the caller's.")
    expect("the steps that are written after a save of step 3", facts["steps"], [3])
    expect(
        "what is written, where the state was changed after save had returned,",
        *(facts["written"], facts["right"]),
        "Copy every tensor, and every dict, list and tuple; on a CPU, tensor.cpu() is no copy.",
    )
    check(
        not facts["is_daemon"],
        "the write runs in a daemon thread: when the program ends, Python cuts it off.",
    )


@task("4.4")
def test_one_write_at_a_time(grade: Grade) -> None:
    run = grade.run(b.save_four, 1, options=Options(has_devices=True))
    facts, num_bytes = run.results[0], 4 * b.NUM_ELEMENTS
    expect(
        "the number of writes that go on at the same time, where four steps are saved,",
        *(facts["most_at_once"], 1),
        "A save waits for the write before it, so that there is one copy in memory.",
    )
    expect(
        "the steps that are written, and their values,",
        *([facts["steps"], facts["values"]], [[1, 2, 3, 4], [{1}, {2}, {3}, {4}]]),
        "Each save is written, in the order of the saves.",
    )
    check_cost(
        run.peak_bytes[0] < 2.5 * num_bytes,
        f"four steps of a state of {num_bytes:,} bytes were saved, and with it up to "
        f"{run.peak_bytes[0]:,} bytes were held: there is memory for one copy. Copy when the write "
        "before has ended, and let go of what is written.",
    )


@task("4.4")
def test_a_copy_has_the_elements_alone_and_is_on_the_cpu(grade: Grade) -> None:
    [(num_bytes, devices)] = grade.run(b.copy_of_a_slice, 1, options=ON_CPU).results
    elements = 4 * (b.NUM_ELEMENTS + 2)
    check_cost(
        num_bytes < 1.5 * elements,
        f"two tensors of {elements:,} bytes together were saved, one of them a slice of a longer "
        f"one; the copies hold {num_bytes:,} bytes. copy.deepcopy copies the whole storage behind "
        "a slice: copy its elements.",
    )
    cause = "On its own device a copy takes the memory that training needs."
    expect("the devices of the copies", devices, ["cpu", "cpu"], cause)


@task("4.4")
def test_waiting_for_what_is_written(grade: Grade) -> None:
    facts = grade.call(b.wait)
    for count, (when, steps) in enumerate(facts["steps"].items(), start=1):
        expect(f"the steps that are written after {when}", steps, [*range(1, count + 1)])
    check(
        facts["comes out"],
        "an error was raised inside of the with statement, and did not come out of it: __exit__ "
        "should return nothing, for what is true there ends the error.",
    )


@task("4.4")
@pytest.mark.parametrize("how", b.FAILURES)
def test_an_error_is_told_once(grade: Grade, how: str) -> None:
    facts = grade.call(b.fail, how)
    what = {"save": "the next save", "wait": "wait", "with": "the end of the with statement"}[how]
    (kind, text), reason = facts["first"], b.FAILURES[how].args[-1]
    check(
        kind == "RuntimeError" and "step 300" in text and reason in text,
        f"the write of step 300 has raised {b.FAILURES[how]!r}. {what} should raise a RuntimeError "
        f"that says 'step 300' and '{reason}'; it raises {kind} {short(text)}. A write may fail "
        "with any error, and in a thread nobody sees it.",
    )
    expect(f"{what} has reported the error: what wait() raises then", facts["second"], [])
    expect("the steps that are written after the error", facts["written"], [], "None is saved.")
    expect(
        "the steps that are written, and the error, when step 302 is saved after that,",
        *([facts["afterwards"], facts["later"]], [[302], []]),
    )


@task("4.4")
def test_the_seconds_of_copy_and_write(grade: Grade) -> None:
    facts = grade.call(b.seconds)
    expect("snapshot_s + write_s before the first save", facts["before"], 0.0)
    check(
        0 < facts["snapshot_s"] <= facts["save_s"] - 0.8 * b.LATE_S,
        f"a save took {facts['save_s']:.3f} s, {b.LATE_S} s of which it waited for the write "
        f"before; snapshot_s should be what the copy took, it is {facts['snapshot_s']:.3f}.",
    )
    check(
        facts["write_s"] >= 0.8 * b.LATE_S,
        f"a write took at least {b.LATE_S} s; when it had ended, write_s was "
        f"{facts['write_s']:.3f}.",
    )
    check(
        0 < facts["second_write_s"] <= facts["all_s"],
        f"the second write took at most {facts['all_s']:.3f} s, and training {b.TRAINING_S:.0f} s "
        f"before it waited for it; write_s is {facts['second_write_s']:.3f}. It should be what the "
        "write took, and so end with it.",
    )
