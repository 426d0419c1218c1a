"""The contract of checkpoints as data, and the tests that check an answer against it.

Tasks 4.1 and 4.3 make the same promises about crashes, damage and which checkpoints are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from distlab.grade import Grade, check, check_cost, task
from distlab.util.text import counted
from judging.checks import short
from judging.expect import expect, over
from phase4.stores import MANIFEST, MORE, Damage, Facts, Plan, name_of, names_a_file

RULES = (
    "A file's content is safe after os.fsync of the file (flush it before), a name that is new, "
    "changed or gone after os.fsync of its folder."
)
Kept = tuple[Sequence[int], Plan, Sequence[tuple[int, ...]]]


def names_of(steps: Sequence[int]) -> list[str]:
    """Return the names of the checkpoints of some steps."""
    return [name_of(step) for step in steps]


def check_load(load: Facts, step: int | None, where: str, cause: str = "") -> None:
    """Check that a load finds a step exactly as it was saved, or no step if ``step`` is None."""
    check(
        load["step"] == step and _is_right(load) and not load["error"],
        f"{where}, {load['function']} should find step {step}, with all keys, dtypes, "
        f"lists, tuples and elements, and its path; it finds {_loaded(load)}. {cause}",
    )


def _is_right(load: Facts) -> bool:
    """Return whether a load that found a step has its state and path."""
    return not load["path"] and load["equal"] == (load["step"] is not None)


def _loaded(load: Facts) -> str:
    if load["error"]:
        return f"none, and raises {short(load['error'])}"
    if load["path"]:
        return f"step {load['step']}, but returns the path {load['path']}"
    return f"step {load['step']}{'' if load['equal'] else ', not as it was saved'}"


def check_closed(names: Sequence[str], after: str) -> None:
    """Check that none of the run's files is open."""
    check(
        not names,
        f"after {after}, these are still open: {short(names)}. A run saves thousands of times, and "
        "a process may have about a thousand open files: os.close what os.open has opened, in a "
        "finally, for a sync may fail.",
    )


@dataclass(frozen=True)
class StoreContract:
    """A task's promises about checkpoints."""

    task: str  # number of the task
    name: str  # word for the checkpoints in the test names
    # Runs a body of ``stores``, given its name, and returns the results by rank.
    run: Callable[..., list[Any]]
    crashes: Mapping[str, Plan]  # saves that crash at every moment, by description
    # Series of saves: their steps, the folder before them, and the steps that should be left after
    # each save.
    kept: Mapping[str, Kept]
    damages: Callable[[Random], Sequence[Damage]]  # draws ways to damage a checkpoint
    is_one_process: bool  # True if a single process writes one file and a manifest
    advice: str = ""  # likely cause of damage after a crash
    parts: Mapping[str, str] = field(default_factory=dict)  # letters of the task's parts, by test

    @property
    def saves(self) -> str:
        """The name of the lesson's function that saves."""
        return "save_checkpoint" if self.is_one_process else "save_sharded"

    def tests(self) -> dict[str, Callable[..., None]]:
        """Return the tests by name, marked as tests of the task."""
        tests: dict[str, Callable[..., None]] = {
            "survive_a_kill": over(["after each operation"], self._test_kill),
            "survive_a_crash": over(self.crashes, self._test_crash),
            "that_are_damaged_are_skipped": over(["each in turn"], self._test_damage),
            "that_are_all_damaged_are_an_error": over(["all"], self._test_all_damaged),
            "that_are_newest_and_undamaged_stay": over(self.kept, self._test_kept),
            "are_not_overwritten": over(["undamaged"], self._test_again),
        }
        if not self.is_one_process:  # several ranks: the crash covers the kill
            del tests["survive_a_kill"]
        return {
            f"test_{self.name}_{n}": task(self.task, part=self.parts.get(n, "a"))(test)
            for n, test in tests.items()
        }

    def _test_kill(self, grade: Grade, _: str) -> None:
        plan = next(iter(self.crashes.values()))
        facts = self.run(grade, "crash", plan, True)[0]
        for state in facts["states"]:
            done = facts["operations"][: state["done"]]
            when = f"if the process is killed after {'; '.join(done[-5:]) or 'nothing'},"
            self._check_state(plan, state, when, "What is done stays done when a process dies.")

    def _test_crash(self, grade: Grade, what: str) -> None:
        plan = self.crashes[what]
        facts = self.run(grade, "crash", plan)[0]
        new, operations = name_of(plan.step), facts["operations"]
        check(facts["path"], f"{self.saves} should return the path of the new checkpoint, …/{new}.")
        self._check_operations(operations, facts["left"], new)
        for state in facts["states"]:
            done = operations[: state["done"]]
            when = (
                f"save of {what}: if the power fails after {len(done)} of {len(operations)} "
                f"operations ({'; '.join(done[-5:]) or 'nothing'}),"
            )
            self._check_state(plan, state, when, RULES)
            if state["is_end"]:
                check_load(
                    *(state, plan.step, f"save of {what}: if the power fails when it has returned"),
                    f"Only these files may have reached the disk: {_files(state)}. {RULES} The "
                    f"save had done this: {'; '.join(done)}. {self.advice}",
                )

    def _check_operations(self, operations: Sequence[str], left: Sequence[str], new: str) -> None:
        check(new in left, f"after the save, the folder should hold {new}; it holds {left}.")
        written = [text for text in operations if text.startswith("writes ")]
        check(
            not self.is_one_process or f"{MANIFEST} (" in "".join(written[-1:]),
            f"manifest.json is the last file of a checkpoint to be written: {short(written)}. It "
            "says that all others are complete, so it must not be there before they are.",
        )

    def _check_state(self, plan: Plan, state: Facts, when: str, rules: str) -> None:
        """Check a state that a crash during the save may leave."""
        names = {path.split("/")[1] for path in state["files"]}
        others = sorted(name for name in names if not name.startswith(("step-", ".step-")))
        check(
            not others,
            f"{when} {others} may be left beside the checkpoints. Let whatever is not finished "
            "have a name that begins with .step-, by which the next save knows what to remove, and "
            "keep no other files: the newest checkpoint is found by the names.",
        )
        broken = [name for name in state["broken"] if name not in names_of(plan.damaged)]
        check(
            not broken,
            f"{when} a damaged checkpoint may be found: {short(broken)}. Left are {_files(state)}. "
            f"{rules} Give a checkpoint its final name when its files are safe, and another before "
            f"you remove them. {self.advice}",
        )
        before = [step for step in plan.there if step not in plan.damaged]
        allowed = [max(before) if before else None, plan.step]
        check(
            not state["error"] and state["step"] in allowed and _is_right(state),
            f"{when} {state['function']} should find step {' or '.join(map(str, allowed))}; it "
            f"finds {_loaded(state)}. Left are {_files(state)}.",
        )
        stay = [step for step in before if step not in plan.renamed]
        check(
            len(state["intact"]) >= min(plan.keep, len(stay)),
            f"{when} {short(state['intact'])} may be all that is left undamaged. Before the save "
            f"there were {counted(len(stay), 'undamaged checkpoint')}, and keep is {plan.keep}: "
            "what is older is removed, but not before the new one is durable, synced folder and "
            "all.",
        )

    def _test_damage(self, grade: Grade, _: str) -> None:
        damages = self.damages(grade.random)
        for rank, loads in enumerate(self.run(grade, "damaged", damages)):
            for damage, facts in zip(damages, loads, strict=True):
                self._check_damage(damage, facts, rank)

    def _check_damage(self, damage: Damage, facts: Facts, rank: int) -> None:
        where = f"{damage} in the newest of three checkpoints"
        where += f", in {facts['file']}" if facts["file"] else ""
        where += "" if self.is_one_process else f", on rank {rank}"
        step = 1 if damage.is_of_two else 2
        cause = (
            "Compare the size and the SHA-256 of every file with those in the manifest, and the "
            "step with the name."
        )
        if facts["file"] == MANIFEST and damage.kind == "a byte too many":
            cause = (
                "All that the manifest says is still right, but the manifest itself has a byte too "
                "many: regenerate its text from the files, and compare."
            )
        check_load(facts, step, where, cause)
        expect(
            f"{where}: the paths in skipped",
            *(sorted(facts["skipped"]), names_of(range(step + 1, 4))),
            f"Step {step} is loaded, and the newest is that of the highest step, whatever the "
            "clock says.",
        )
        reason = facts["skipped"][name_of(3)]
        # A manifest with a flipped bit may list a missing file, such as ``ctate.pt``.
        may_name_any = facts["file"] == MANIFEST and damage.kind == "a flipped bit"
        damaged_file = facts["file"] if self.is_one_process else ""
        check(
            names_a_file(reason, facts["files"], damaged_file) or (may_name_any and reason),
            f"{where}: the reason should name the file that is damaged, of "
            f"{short(facts['files'])}; it says {reason!r:.200}.",
        )
        older = [name for name in facts["read"] if name < name_of(step)]
        check_cost(
            not older,
            f"{where}: step {step} is loaded, yet files of {older} were read. Reading all that is "
            "kept costs minutes where a checkpoint is large: stop at the first undamaged one.",
        )
        self._check_reads(facts["read"], where, twice=name_of(step))

    def _check_reads(self, times: Mapping[str, int], where: str, twice: str = "") -> None:
        often = [name for name, n in times.items() if n > 1 + (name == twice)]
        check_cost(
            not often or not self.is_one_process,
            f"{where}: a file of {often} was read several times ({dict(times)}). Each checkpoint "
            "that is looked at is read once, and the loaded one twice: that takes minutes where it "
            "is large.",
        )

    def _test_all_damaged(self, grade: Grade, _: str) -> None:
        for rank, facts in enumerate(self.run(grade, "load_where_all_are_damaged")):
            error = facts["all"]["error"]
            check(
                error.startswith("RuntimeError")
                and all(name in error for name in names_of((1, 2)))
                and names_a_file(error, facts["files"], ""),
                f"two checkpoints, both damaged: {facts['all']['function']} on rank {rank} should "
                "raise a RuntimeError that names both, and a file of each; "
                f"{f'it raises {error!r:.200}' if error else 'it raises nothing'}. A run that gets "
                "None begins again, and overwrites what might have been saved.",
            )
            check(
                facts["unchanged"],
                f"{facts['all']['function']} should change nothing in the folder; it has.",
            )
            for where, load in facts["nothing"].items():
                check_load(load, None, where)

    def _test_kept(self, grade: Grade, what: str) -> None:
        steps, plan, right = self.kept[what]
        newest = max((*steps, *(step for step in plan.there if step not in plan.damaged)))
        for facts in self.run(grade, "save_all", steps, plan):
            for step, left, times, kept in zip(
                steps, facts["left"], facts["read"], right, strict=True
            ):
                self._check_reads(times, f"save of step {step}, where {plan.there} were there")
                expect(
                    f"steps {plan.there} were there, damaged {plan.damaged}; then {steps} were "
                    f"saved with keep={plan.keep}. The folder after step {step}",
                    *(left, names_of(kept)),
                    "Count undamaged ones only, and remove what is older than all of them, "
                    "and .step-*, the leftovers of a crash.",
                )
            check(
                MORE not in facts["files"],
                f"a killed attempt had left {MORE}: the new checkpoint should not have it; it has "
                f"{facts['files']}. Begin with an empty folder.",
            )
            if self.is_one_process:
                check_closed(facts["open"], "saves and a load")
            check_load(facts, newest, f"after the saves of {steps}")
            check(
                facts["unchanged"],
                f"{self.saves} has changed what it was given, which is the caller's.",
            )

    def _test_again(self, grade: Grade, _: str) -> None:
        for facts in self.run(grade, "save_again"):
            check(
                facts["refusal"].startswith("FileExistsError"),
                f"step 2 is saved again, while its checkpoint is undamaged: {self.saves} should "
                f"raise a FileExistsError; it raises {facts['refusal'] or 'nothing'}.",
            )
            expect("the folder after the refusal", facts["left"], names_of((1, 2)))
            check_load(facts, 2, "after the refusal")


def _files(state: Facts) -> str:
    sizes = [f"{name} ({size:,} bytes)" for name, size in state["files"].items()]
    return ", ".join(sizes) or "no files"
