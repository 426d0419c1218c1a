"""Each mutant has one change, in code that learners write, and none is made twice."""

import libcst as cst
import pytest

from wrong_answers.bank import COURSE, ROOT
from wrong_answers.changes import change_between, changed
from wrong_answers.mutation import mutants_of, mutations, named, written_for


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("have *= 2", ["have *= 3", "have /= 2", "have = 2", "pass"]),
        ("x = a if b else c", ["x = a if (b) and False else c", "x = a if (b) or True else c"]),
        ("send(x, group=group)", ["send(x)", "pass"]),
        ("size = dist.get_world_size(group)", ["size = dist.get_world_size(None)"]),
        ("if given: pass", ["if not given: pass"]),
        ("if a < b: pass", ["if a <= b: pass"]),
        ("return [*zip(a, b, strict=True)]", ["pass"]),
        ("'a text that + says - something'", []),
        ("x: Literal[3] = f(y=1)", ["x: Literal[3] = f(y=2)", "x: Literal[3] = f(y=None)"]),
        ("raise ValueError(f'{a + 1} of {b}')", ["pass"]),
    ],
)
def test_a_line_has_these_mutants(line: str, mutants: list[str]) -> None:
    module = cst.parse_module(f"def f():\n    {line}\n")
    [function] = module.body
    assert isinstance(function, cst.FunctionDef)
    made = [module.deep_replace(old, new).code for old, new in mutations(function)]
    assert sorted(made) == sorted(f"def f():\n    {mutant}\n" for mutant in mutants)


def test_a_decorator_is_dropped() -> None:
    module = cst.parse_module("@torch.no_grad()\ndef f():\n    pass\n")
    [(old, new)] = mutations(module.body[0])
    assert module.deep_replace(old, new).code == "def f():\n    pass\n"


def test_a_mutant_is_its_change_of_the_solution() -> None:
    task = COURSE.tasks[0]
    solution = (ROOT / task.solution).read_text()
    mutants = list(mutants_of(task))
    lessons = [mutant.lesson for mutant in mutants]
    assert lessons
    assert len({solution, *lessons}) == len(lessons) + 1
    assert lessons == [changed(solution, mutant.change) for mutant in mutants]


def test_what_is_written_for_a_task_has_one_owner_and_is_not_given() -> None:
    owned = [(task, name) for task in COURSE.tasks for name in written_for(task)]
    assert {(task, name) for task in COURSE.tasks for name in task.functions} <= set(owned)
    assert len({(task.lesson, name) for task, name in owned}) == len(owned)
    for task, name in owned:
        owner, _, function = name.rpartition(".")
        template = (ROOT / task.template).read_text()
        is_given = f"def {function}(" in template and f"class {owner}" in template
        assert name in task.functions or not is_given


def test_a_task_may_be_a_class() -> None:
    functions = ["f", "fit", "Trainer.fit", "Trainer.f", "Train.f"]
    assert named(["f", "Trainer"], functions) == ["f", "Trainer.fit", "Trainer.f"]
    assert named(["Trainer.fit"], functions) == ["Trainer.fit"]


def test_the_context_of_a_change_makes_its_place_unique() -> None:
    text = "a\nb\nc\na\nb\nd\n"
    assert change_between(text, "a\nb\nc\na\nx\nd\n") == "-b\n+x\n d\n"
    assert changed(text, change_between(text, "a\nb\nc\nx\nb\nd\n")) == "a\nb\nc\nx\nb\nd\n"


def test_a_helper_belongs_to_the_class_that_calls_it() -> None:
    columns, rows = (written_for(COURSE.task(id)) for id in ("2.13", "2.14"))
    assert "_copy" in rows
    assert not {"_copy", "RowParallelLinear.__init__"} & set(columns)


def test_a_class_that_is_called_is_a_helper() -> None:
    assert {"_Stage.__init__", "_Stage.finish"} <= set(written_for(COURSE.task("2.10")))


def test_a_method_is_reached_through_its_class_not_through_a_name_that_others_have() -> None:
    regions = set(written_for(COURSE.task("2.12")))
    assert {"_Region.forward", "_Region.backward"} <= regions
    assert "_RowWithScatter.forward" not in regions
    assert "_RowWithScatter.forward" in written_for(COURSE.task("2.17"))


def test_a_method_that_another_of_its_class_calls_is_a_helper() -> None:
    assert "LossScaler._divide" in written_for(COURSE.task("2.3"))
