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
from phase4.sharded import Broken, Cut, Plan, name_of

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


def _plan(grade: Grade, num_ranks: int) -> Plan:
    tensors = {f"layer.{i}": (grade.random.randint(5, 60), d) for i, d in enumerate(DTYPES)}
    return Plan(tensors, _cuts(grade, tensors, num_ranks))


def _quarters(numel: int) -> Plan:
    cuts: list[list[Cut]] = [[("w", r * numel // 4, (r + 1) * numel // 4)] for r in range(4)]
    return Plan({"w": (numel, "float32")}, cuts)


# Any number of ranks


@task("4.3")
@pytest.mark.parametrize(("num_writers", "num_readers"), [(1, 3), (4, 4), (2, 5)])
def test_any_number_of_ranks_loads(grade: Grade, num_writers: int, num_readers: int) -> None:
    _check_resharding(grade, num_writers, num_readers)


@task("4.3", real=True)
def test_three_ranks_save_and_two_load(grade: Grade) -> None:
    _check_resharding(grade, 3, 2)


def _check_resharding(grade: Grade, num_writers: int, num_readers: int) -> None:
    plan = _plan(grade, num_writers)
    wanted = _cuts(grade, dict(plan.tensors), num_readers)
    run = _run(grade, b.save_and_load, max(num_writers, num_readers), plan, wanted)
    where = f"saved on {num_writers} ranks, loaded on {num_readers}: rank"
    for rank, found in enumerate(run.results[:num_writers]):
        expect(
            f"{where} {rank}: the path that save_sharded returns, and whether it exists then",
            *(found["saved"], [name_of(2), True]),
            "No rank returns before rank 0 has renamed the folder.",
        )
        check(found["unchanged"], f"{where} {rank}: save_sharded changed its shards.")
    for rank, found in enumerate(run.results[:num_readers]):
        expect(f"{where} {rank}: step and path", found["loaded"], [2, name_of(2)], "The newest.")
        _check_values(found, f"{where} {rank}")


def _check_values(found: dict[str, Any], where: str) -> None:
    expect(
        *(f"{where}: the elements that are loaded", found["values"], found["right"]),
        "A rank's slice may begin inside one file and end in another, with any number of ranks, "
        "and what it wants may lie in several files.",
    )


@task("4.3")
def test_shards_inside_a_group(grade: Grade) -> None:
    with TemporaryDirectory(prefix="distlab-") as root:
        results = results_in_group(grade, b.save_once, root, _plan(grade, 3))
    for rank, found in enumerate(results):
        _check_values(found, f"inside a group, rank {rank}")


@task("4.3")
def test_all_go_by_the_list_of_rank_0(grade: Grade) -> None:
    for rank, found in enumerate(_run(grade, b.load_with_other_lists, 3, _plan(grade, 3)).results):
        expect(
            f"rank 0 sees the steps 1 and 2, and the file system shows the others an old list, "
            f"with a step 3 too: the step that rank {rank} loads",
            *(found["step"], 2),
            "Let rank 0 list the folder, and broadcast what it has found.",
        )
        _check_values(found, f"rank {rank}")


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


@task("4.3")
@pytest.mark.parametrize("keep", [2, 3])
def test_a_crash_leaves_whole_checkpoints(grade: Grade, keep: int) -> None:
    tensors = {"w": (12, "float32")}
    loads = _run(grade, b.crash, 3, Plan(tensors, _cuts(grade, tensors, 3)), keep).results[0]
    for step, error in loads["during"]:
        check(
            step in (2, 3) and not error,
            f"after a crash while step 3 was saved, beside steps 1 and 2: {error}. Each "
            "rank syncs its own file before it reports; then rank 0 writes and syncs the manifest, "
            "syncs the folder, and renames it.",
        )
    for step, error in loads["after"]:
        check(
            step == 3 and not error,
            f"save_sharded of step 3 had returned on a rank, and after a crash step {step} is the "
            f"newest. {error} Sync the folder after the rename, and let no rank return before: the "
            "disk of rank 0 may be slow.",
        )


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
    run = _run(grade, b.save_on_a_broken_disk, 3, _plan(grade, 3), broken)
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


@task("4.3")
def test_damage_is_found_by_all_ranks(grade: Grade) -> None:
    damages = ["missing", "shorter", "longer", "changed"]
    run = _run(grade, b.load_damaged, 3, _plan(grade, 3), damages)
    for rank, (is_none, *loads) in enumerate(run.results):
        check(is_none, f"there is no checkpoint yet: load_sharded should return None on {rank}.")
        for found in loads:
            here = f"{found['file']} of step 2 is {found['damage']}: rank {rank}"
            step, reasons = found["right step"], found["reasons"]
            cause = "All ranks go by what any of them has found."
            expect(f"{here}: the step", found["step"], step, cause)
            _check_values(found, here)
            check(
                [name for name, _ in reasons] == [name_of(2)] * (step == 1)
                and all(found["file"] in why or "manifest" in why for _, why in reasons),
                f"{here} should say in skipped which file it is; it says {reasons}.",
            )


@task("4.3")
def test_without_undamaged_shards_nothing_is_loaded(grade: Grade) -> None:
    run = _run(grade, b.load_where_all_are_damaged, 3, _plan(grade, 3))
    for rank, found in enumerate(run.results):
        kind, text = found["refusal"]["type"], found["refusal"]["text"]
        check(
            kind == "RuntimeError"
            and all(name_of(step) in text for step in (1, 2))
            and (found["file"] in text or "manifest" in text),
            f"{found['file']} of steps 1 and 2 is damaged; rank {rank} should raise a RuntimeError "
            f"that names both steps and the file; it raises {kind or 'none'} {short(text)}. Who "
            "gets None begins anew, and overwrites what might have been saved.",
        )
        check(found["unchanged"], "load_sharded should change nothing in the folder; it has.")


LACKS = {  # tensor, its length and dtype, wanted slice, and texts of which the error has one
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
    plan = Plan(tensors, [[("w", 0, 5)], [("w", 9, 16), ("b", 0, 4)], [("w", 5, 5)]])
    wanted = Plan({**tensors, tensor: kind}, [[("b", 0, 4)], [(tensor, start, stop)], []])
    results = _run(grade, b.load_what_is_missing, 3, plan, wanted).results
    refusals = [found["refusal"] for found in results]
    named = [name for name in names if name in refusals[0]["text"]]
    check_refused(refusals, what, tensor, (named or names)[0], same_text=False)
    unchanged = [found["unchanged"] for found in results]
    expect_on_all_ranks(f"{what} is refused: whether wanted is unchanged", unchanged, True)


# What lies there already


@task("4.3")
def test_what_lies_there_already(grade: Grade) -> None:
    for rank, found in enumerate(_run(grade, b.save_what_is_there, 3, _plan(grade, 3)).results):
        check(
            "rank-00007.bin" not in found["names"],
            f"a killed attempt of 8 ranks had left rank-00007.bin: {found['names']} should not "
            "have it. Begin with an empty folder.",
        )
        expect(
            f"step 1 is there and undamaged: the refusal of another save on rank {rank}",
            *(found["refusal"], "FileExistsError"),
        )
        expect("with keep=2, the folder after step 3", found["left"], [name_of(2), name_of(3)])


@task("4.3")
@pytest.mark.parametrize(
    ("there", "damaged", "step", "right"),
    [((1, 2, 3), (3,), 4, (2, 3, 4)), ((1, 5, 6), (), 3, (3, 5, 6))],
    ids=["a damaged one among them", "an earlier step than others"],
)
def test_the_newest_undamaged_shards_stay(
    grade: Grade,
    there: tuple[int, ...],
    damaged: tuple[int, ...],
    step: int,
    right: tuple[int, ...],
) -> None:
    run = _run(grade, b.save_and_keep_two, 2, _plan(grade, 2), there, damaged, step)
    expect_on_all_ranks(
        f"steps {there} were there, damaged {damaged}; then step {step} was saved with keep=2. The "
        "folder",
        *(run.results, [*map(name_of, right)]),
        "Count undamaged ones only, and remove what is older than all of them.",
    )
