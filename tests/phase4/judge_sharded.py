"""Judges task 4.3: who may load what, what a crash leaves, and that all ranks end alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest

from distlab.grade import Grade, Run, check, task
from distlab.sim import Options
from distlab.util.text import joined
from judging.checks import check_refused, of_members, short
from judging.groups import OUTER_WORLD_SIZE, STUCK_IN_GROUP, inside_group
from phase4 import sharded as b
from phase4 import sharded_costs as costs
from phase4.sharded import Broken, Cut, Plan

STUCK = (
    "A rank that fails must say so before it raises: the others wait for it. Gather on all ranks "
    "what came of each step, errors too, and then raise on all of them."
)
DTYPES = ("float32", "bfloat16", "int64", "float64")


@contextmanager
def _root() -> Iterator[str]:
    with TemporaryDirectory(prefix="distlab-") as root:
        yield root


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
        for rank, mine in enumerate(by_rank):
            start, stop = bounds[rank : rank + 2]
            if start < stop or place == 0 or grade.random.random() < 0.5:
                mine.append((name, grade.random.randint(0, start) if place % 2 else start, stop))
    return by_rank


def _tensors(grade: Grade, longest: int = 60) -> dict[str, tuple[int, str]]:
    random = grade.random
    return {f"layer.{i}": (random.randint(5, longest), dtype) for i, dtype in enumerate(DTYPES)}


def _plan(grade: Grade, num_ranks: int) -> Plan:
    tensors = _tensors(grade)
    return Plan(tensors, _cuts(grade, tensors, num_ranks))


def _check_loaded(results: list[dict[str, object]], num_writers: int, num_readers: int) -> None:
    where = f"saved on {num_writers} ranks, loaded on {num_readers}"
    for rank, found in enumerate(results[:num_writers]):
        check(
            found["path"] == "step-00000002" and found["is_there"],
            f"{where}: when save_sharded returned {found['path']} on rank {rank}, step-00000002 "
            f"was {'' if found['is_there'] else 'not '}there. No rank returns before rank 0 has "
            "renamed the folder.",
        )
        check(found["unchanged"], f"{where}: save_sharded changed the shards of rank {rank}.")
    for rank, found in enumerate(results[:num_readers]):
        check(
            found["step"] == 2 and found["loaded_path"] == "step-00000002",
            f"{where}: rank {rank} loaded step {found['step']} of {found['loaded_path']}, not "
            "the newest, 2.",
        )
        check(
            found["values"] == found["right"],
            f"{where}: rank {rank} should have {short(found['right'])}, it has "
            f"{short(found['values'])}. A rank's slice may begin inside one file and end in "
            "another, with any number of ranks, and what it wants may lie in several files.",
        )


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
    world_size = max(num_writers, num_readers)
    with _root() as root:
        run = grade.run(b.save_and_load, world_size, root, plan, wanted, if_stuck=STUCK)
    _check_loaded(run.results, num_writers, num_readers)


@task("4.3")
def test_shards_inside_a_group(grade: Grade) -> None:
    plan = _plan(grade, 3)
    with _root() as root:
        run = grade.run(
            *(inside_group, OUTER_WORLD_SIZE, b.save_once, root, plan), if_stuck=STUCK_IN_GROUP
        )
    for rank, found in enumerate(of_members(run)):
        check(
            found["values"] == found["right"],
            f"inside a group, rank {rank} should have {short(found['right'])}, it has "
            f"{short(found['values'])}.",
        )


@task("4.3")
def test_no_element_travels(grade: Grade) -> None:
    numel = 400_000
    cuts: list[list[Cut]] = [[("w", r * numel // 4, (r + 1) * numel // 4)] for r in range(4)]
    plan = Plan({"w": (numel, "float32")}, cuts)
    with _root() as root:
        run = grade.run(costs.save_large, 4, root, plan, if_stuck=STUCK)
    _check_costs(run, 4 * numel)


def _check_costs(run: Run, num_bytes: int) -> None:
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
    with _root() as root:
        run = grade.run(costs.memory_of_save, 1, root, options=Options(has_devices=True))
    held = run.results[0] + run.peak_bytes[0] - costs.NUM_BYTES
    check(
        held < 1.5 * costs.NUM_BYTES,
        f"shards of {costs.NUM_BYTES:,} bytes were saved, and that took {held:,} bytes more: there "
        "is memory for one further copy. A tensor's bytes can be written from where they lie: "
        "values.view(torch.uint8).numpy().",
    )


@task("4.3")
def test_each_file_is_read_by_one_rank_and_by_who_wants_it(grade: Grade) -> None:
    numel = 4 * costs.LARGE_BYTES
    cuts: list[list[Cut]] = [[("w", r * numel // 4, (r + 1) * numel // 4)] for r in range(4)]
    wanted: list[list[Cut]] = [[], [], [("w", 5, 10)], []]
    with _root() as root:
        plan = Plan({"w": (numel, "float32")}, cuts)
        reads = grade.run(costs.who_reads, 4, root, plan, wanted, if_stuck=STUCK).results[0]
    for what, more in (("save", 0), ("load nothing", 0), ("load", 1)):
        of_ranks = [sum(rank == reader for reader, _ in reads[what]) for rank in range(4)]
        check(
            sum(of_ranks) <= 4 + more and max(of_ranks) <= 2 + more,
            f"a checkpoint of 4 ranks, each with a file of its own; {WHO_READS[what]}. The ranks 0 "
            f"to 3 have read {short(of_ranks)} of these files. Let each rank check about a quarter "
            "of them and tell the others, and then read what it wants alone.",
        )


WHO_READS = {
    "save": "it is checked while another is saved, once in all",
    "load nothing": "nobody wants anything, so it is checked and no more",
    "load": "rank 2 wants 5 elements of the first file, after the check",
}


@task("4.3")
@pytest.mark.parametrize("keep", [2, 3])
def test_a_crash_leaves_whole_checkpoints(grade: Grade, keep: int) -> None:
    tensors = {"w": (12, "float32")}
    plan = Plan(tensors, _cuts(grade, tensors, 3))
    with _root() as root:
        found = grade.run(b.crash, 3, root, plan, keep, if_stuck=STUCK).results[0]
    for state in found["during"]:
        check(
            state["step"] in (2, 3) and not state["error"],
            f"after a crash while step 3 was saved, beside steps 1 and 2: {state['error']}. Each "
            "rank syncs its own file before it reports; then rank 0 writes and syncs the manifest, "
            "syncs the folder, and renames it.",
        )
    for state in found["after"]:
        check(
            state["step"] == 3 and not state["error"],
            f"save_sharded of step 3 had returned on a rank, and after a crash step "
            f"{state['step']} is the newest. {state['error']} Sync the folder after the rename, "
            "and let no rank return before: the disk of rank 0 may be slow.",
        )


BROKEN = {
    "rank 0 has a full disk": Broken({0: b.FULL}),
    "rank 2 has a full disk": Broken({2: b.FULL}),
    "ranks 1 and 2 can't write": Broken({1: b.FULL, 2: b.UNREADABLE}),
    "rank 0 can't sync the run's folder": Broken({0: b.UNREADABLE}, is_late=True),
}


@task("4.3")
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_disk_is_an_error_on_all_ranks(grade: Grade, what: str) -> None:
    plan = _plan(grade, 3)
    with _root() as root:
        run = grade.run(b.save_on_a_broken_disk, 3, root, plan, BROKEN[what], if_stuck=STUCK)
    names = [f"rank {rank}" for rank in BROKEN[what].reasons]
    names += [reason for _, reason in BROKEN[what].reasons.values()]
    for rank, found in enumerate(run.results):
        text = found["error"]["text"]
        check(
            found["error"]["type"] and all(name in text for name in names),
            f"{what}; rank {rank} should raise an OSError that says {joined(names)}; it "
            f"{'raises ' + short(text) if found['error']['type'] else 'raises none'}.",
        )
        check(
            found["left"] == ["step-00000001"],
            f"{what}; when rank {rank} raises, there should be step-00000001 alone; there are "
            f"{found['left']}. What was written is removed first, whatever its name is by then.",
        )


@task("4.3")
def test_damage_is_found_by_all_ranks(grade: Grade) -> None:
    plan = _plan(grade, 3)
    damages = ["missing", "shorter", "longer", "changed"]
    with _root() as root:
        run = grade.run(b.load_damaged, 3, root, plan, damages, if_stuck=STUCK)
    for rank, (is_none, *cases) in enumerate(run.results):
        check(is_none, f"there is no checkpoint yet: load_sharded should return None on {rank}.")
        for case in cases:
            here = f"{case['file']} of step 2 is {case['damage']}: rank {rank}"
            step = 1 if case["is_damaged"] else 2
            check(
                case["step"] == step,
                f"{here} should load step {step}, it loads {case['step']}. All ranks go by what "
                "any of them has found.",
            )
            check(case["values"] == case["right"], f"{here} has other elements than were saved.")
            reasons = [] if step == 2 else ["step-00000002"]
            check(
                [name for name, _ in case["reasons"]] == reasons
                and all(case["file"] in why or "manifest" in why for _, why in case["reasons"]),
                f"{here} should say in skipped which file it is; it says {case['reasons']}.",
            )


@task("4.3")
def test_without_undamaged_shards_nothing_is_loaded(grade: Grade) -> None:
    plan = _plan(grade, 3)
    with _root() as root:
        run = grade.run(b.load_where_all_are_damaged, 3, root, plan, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        text = found["refusal"]["text"]
        check(
            found["refusal"]["type"] == "RuntimeError"
            and all(f"step-0000000{step}" in text for step in (1, 2)),
            f"steps 1 and 2 are there, both damaged; rank {rank} should raise a RuntimeError that "
            f"names both; it raises {found['refusal']['type'] or 'none'} {short(text)}. Who gets "
            "None begins anew, and overwrites what might have been saved.",
        )
        check(
            found["file"] in text or "manifest" in text,
            f"{found['file']} of both steps is damaged, and the RuntimeError should say so; on "
            f"rank {rank} it says {short(text)}.",
        )
        check(found["unchanged"], "load_sharded should change nothing in the folder; it has.")


LACKS = {  # which tensor is wanted, as what, which elements; a refusal names one of the last
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
    with _root() as root:
        run = grade.run(b.load_what_is_missing, 3, root, plan, wanted, if_stuck=STUCK)
    refusals = [found["refusal"] for found in run.results]
    named = [name for name in names if name in refusals[0]["text"]]
    check_refused(refusals, what, tensor, (named or names)[0], same_text=False)
    for rank, found in enumerate(run.results):
        check(found["unchanged"], f"{what} is refused, but rank {rank} has changed wanted.")


@task("4.3")
def test_what_lies_there_already(grade: Grade) -> None:
    plan = _plan(grade, 3)
    with _root() as root:
        run = grade.run(b.save_what_is_there, 3, root, plan, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        check(
            "rank-00007.bin" not in found["names"],
            f"a killed attempt of 8 ranks had left rank-00007.bin: {found['names']} should not "
            "have it. Begin with an empty folder.",
        )
        check(
            found["refused"] == "FileExistsError",
            f"step 1 is there and undamaged: rank {rank} should raise FileExistsError.",
        )
        check(
            found["left"] == ["step-00000002", "step-00000003"],
            f"with keep=2, steps 2 and 3 should be left; there are {found['left']}.",
        )


@task("4.3")
def test_all_go_by_the_list_of_rank_0(grade: Grade) -> None:
    plan = _plan(grade, 3)
    with _root() as root:
        run = grade.run(b.load_with_other_lists, 3, root, plan, if_stuck=STUCK)
    for rank, found in enumerate(run.results):
        check(
            found["step"] == 2 and found["values"] == found["right"],
            "rank 0 sees the steps 1 and 2; the file system shows the others an old list, with a "
            f"step 3 too. All should load step 2, but rank {rank} loads step {found['step']}. Let "
            "rank 0 list the folder, and broadcast what it has found.",
        )


@task("4.3")
@pytest.mark.parametrize(
    ("there", "damaged", "step", "expected"),
    [((1, 2, 3), (3,), 4, (2, 3, 4)), ((1, 5, 6), (), 3, (3, 5, 6))],
    ids=["a damaged one among them", "an earlier step than others"],
)
def test_the_newest_undamaged_shards_stay(
    grade: Grade,
    there: tuple[int, ...],
    damaged: tuple[int, ...],
    step: int,
    expected: tuple[int, ...],
) -> None:
    plan = _plan(grade, 2)
    with _root() as root:
        run = grade.run(b.save_and_keep_two, 2, root, plan, there, damaged, step, if_stuck=STUCK)
    right = [f"step-{one:08d}" for one in expected]
    for rank, left in enumerate(run.results):
        check(
            left == right,
            f"steps {there} were there, damaged {damaged}; then step {step} was saved with "
            f"keep=2. Rank {rank} should find the steps {expected}; there are {left}. Count "
            "undamaged ones only, and remove what is older than all of them.",
        )
