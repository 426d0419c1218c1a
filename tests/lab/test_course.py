"""course.toml, and that templates and solutions are what it lists."""

import ast
import contextlib
import importlib
import inspect
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from own_phases import shipped

from distlab.course import Course, CourseError, Phase, Task, anchor, label_width, load
from distlab.words import joined

ROOT = Path(__file__).parents[2]
COURSE = shipped(load(ROOT))
TASKS = COURSE.tasks
TEMPLATES = sorted({task.template for task in TASKS})

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
each_template = pytest.mark.parametrize("template", TEMPLATES, ids=str)


# --- course.toml ---------------------------------------------------------------------------------


def test_ids_count_the_tasks_of_a_phase() -> None:
    for phase in COURSE.phases:
        counted = [f"{phase.number}.{k}" for k in range(1, len(phase.tasks) + 1)]
        ids = [task.id for task in phase.tasks]
        assert phase.unfinished or ids == counted


def test_the_course_is_as_the_file_says() -> None:
    task = COURSE.task("1.5")
    assert (task.title, task.lesson) == ("Broadcast along a tree", "collectives")
    assert task.functions == ("broadcast",)
    assert COURSE.task("1.10").functions == ("average_gradients", "average_gradients_flat")
    assert task.template == Path("phase1_data_parallel/template_collectives.py")
    assert task.solution == Path("solutions/phase1_data_parallel/collectives.py")
    assert task.guide == "guidelines.md#15-broadcast-along-a-tree"
    assert len({*TASKS}) == len(TASKS)  # they can be keys


@pytest.mark.parametrize(
    ("id", "label"),
    [
        ("1.4", "exchange"),
        ("1.13", "Trainer.fit"),
        ("2.4", "LossScaler"),
        ("2.9", "StageRunner and 2 more"),
        ("2.14", "copy_to_tensor_region and 1 more"),
        ("2.18", "VocabParallelEmbedding and 1 more"),
    ],
)
def test_a_label_names_all_that_there_is_to_write(id: str, label: str) -> None:
    assert COURSE.task(id).label == label


def test_a_column_of_labels_keeps_them_apart_from_the_next() -> None:
    first, second = (phase.tasks for phase in COURSE.phases[:2])
    assert label_width(first) == 32
    assert label_width(second) == max(len(task.label) for task in second) + 2 > 32


def test_points_of_a_phase_are_a_hundred() -> None:
    for phase in COURSE.phases:
        assert phase.points < 100 if phase.unfinished else phase.points == 100


def test_reading_the_course_needs_no_torch() -> None:
    program = "import sys; from distlab.course import load; load(__import__('pathlib').Path('.'))"
    program += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("look_up", "says"),
    [
        (lambda: COURSE.task("1.55"), "there is no task '1.55'. Did you mean '1.5'?"),
        (lambda: COURSE.task("x"), "there is no task 'x'. There are: 1.1, 1.2, 1.3, 1.4, 1.5, 1.6"),
        (lambda: COURSE.phase(7), "there is no phase '7'. There are: 1"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_the_nearest(
    look_up: Callable[[], object], says: str
) -> None:
    with pytest.raises(CourseError) as error:
        look_up()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


SMALL = """
title = "Small"
[[phase]]
number = 1
title = "First"
folder = "phase1"
[[phase.lesson]]
name = "sums"
title = "Sums"
[[phase.lesson.task]]
id = "1.1"
function = "add"
title = "Add"
points = 5
minutes = 10
difficulty = 2
[[phase.lesson.task]]
id = "1.2"
function = "subtract"
title = "Subtract"
points = 5
minutes = 10
difficulty = 2
also = ["minus"]
"""


def small(tmp_path: Path, text: str = SMALL) -> Course:
    (tmp_path / "course.toml").write_text(text, encoding="utf-8")
    return load(tmp_path)


def test_small_course_is_read(tmp_path: Path) -> None:
    add, subtract = small(tmp_path).tasks
    assert add == Task("1.1", "add", "Add", 5, 10, 2, lesson="sums", folder="phase1")
    assert subtract.functions == ("subtract", "minus")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "minutes = 10",
            "minuets = 10",
            "task 1.1: unknown key 'minuets'. Did you mean 'minutes'?",
        ),
        ("minutes = 10\n", "", "task 1.1: minutes is missing"),
        ("points = 5", "points = 0", "points must be a whole number from 1 on, not 0"),
        ("points = 5", "points = true", "points must be a whole number from 1 on, not True"),
        ("difficulty = 2", "difficulty = 6", "task 1.1: difficulty must be 1 to 5, not 6"),
        ('title = "Add"', "title = 3", "task 1.1: title must be text, not 3"),
        ('["minus"]', "2", 'task 1.2: also must be like ["name"], not 2'),
        ('["minus"]', '["add"]', "function add is listed twice"),
        ('id = "1.2"', 'id = "1.1"', "task 1.1 comes after 1.1 in sums"),
        ("number = 1", "number = 1\nunfinished = 1", "unfinished must be true or false, not 1"),
        ('id = "1.2"', 'id = "1.4"', "task 1.4 stands where 1.2 should"),
        ('"subtract"', '"add"', "function add is listed twice"),
        ('name = "sums"', 'names = "sums"', "phase 1, lesson ?: unknown key 'names'"),
        ("[[phase]]", "[[phases]]", "course: unknown key 'phases'. Did you mean 'phase'?"),
        ("[[phase.lesson.task]]", "[phase.lesson.task]", "course.toml: "),
        ("[[phase.lesson]]", "[phase.lesson]", "lesson must be a list of tables, [[lesson]]"),
        ('title = "Small"', "title = ", "course.toml: "),
        (
            'folder = "phase1"\n',
            'folder = "phase1"\nchallenge = "add"\n',
            "challenge of phase1 must be a table, [phase.challenge]",
        ),
        (
            'folder = "phase1"\n',
            'folder = "phase1"\n[phase.challenge]\nfunction = "add"\ntitle = "x"\nlesson = "y"\n',
            "function add is listed twice",
        ),
    ],
)
def test_mistake_in_the_file_is_one_line_that_says_where(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in SMALL
    with pytest.raises(CourseError) as error:
        small(tmp_path, SMALL.replace(old, new, 1))
    assert says in str(error.value)
    assert "course.toml: " in str(error.value)
    assert "\n" not in str(error.value)


UNFINISHED = SMALL.replace("number = 1\n", "number = 1\nunfinished = true\n", 1)


def test_an_unfinished_phase_may_lack_tasks_in_between(tmp_path: Path) -> None:
    course = small(tmp_path, UNFINISHED.replace('id = "1.2"', 'id = "1.4"'))
    assert [task.id for task in course.tasks] == ["1.1", "1.4"]


@pytest.mark.parametrize("id", ["1.1", "1.0", "2.1", "1.x"])
def test_an_unfinished_phase_still_has_its_ids_in_order(tmp_path: Path, id: str) -> None:
    with pytest.raises(CourseError, match=rf"task {id} comes after 1\.1 in sums"):
        small(tmp_path, UNFINISHED.replace('id = "1.2"', f'id = "{id}"'))


def test_a_task_of_another_phase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"task 2\.3 stands where 1\.2 should"):
        small(tmp_path, UNFINISHED.replace('id = "1.2"', 'id = "2.3"'))


BETWEEN = """
[[phase.lesson]]
name = "products"
title = "Products"
[[phase.lesson.task]]
id = "1.2"
function = "multiply"
title = "Multiply"
points = 5
minutes = 10
difficulty = 2
"""


def test_tasks_of_two_lessons_may_alternate(tmp_path: Path) -> None:
    tasks = small(tmp_path, SMALL.replace('id = "1.2"', 'id = "1.3"') + BETWEEN).tasks
    assert [(task.id, task.lesson) for task in tasks] == [
        ("1.1", "sums"),
        ("1.2", "products"),
        ("1.3", "sums"),
    ]
    with pytest.raises(CourseError, match=r"task 1\.2 stands where 1\.3 should"):
        small(tmp_path, SMALL + BETWEEN)


def test_folder_without_a_course_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="not found"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("heading", "link"),
    [
        ("1.6 All-reduce, the naive way", "16-all-reduce-the-naive-way"),
        ("1.8 Measure α and β", "18-measure-α-and-β"),
        ("`fit_it` (again)!", "fit_it-again"),
    ],
)
def test_anchors_are_those_of_github(heading: str, link: str) -> None:
    assert anchor(heading) == link


# --- templates and solutions ---------------------------------------------------------------------

Names = dict[str, ast.stmt]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def names_in(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """What a file defines by name; of classes the methods too, and what else stands in them."""
    for place, statement in enumerate(body):
        if isinstance(statement, ast.FunctionDef):
            yield prefix + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            head = ast.ClassDef(statement.name, statement.bases, statement.keywords, [], [])
            head.decorator_list = statement.decorator_list
            yield prefix + statement.name, head
            yield from names_in(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            yield prefix + ast.unparse(target), statement
        elif prefix:
            yield f"{prefix}{place}", statement  # the docstring of a class


@cache
def names_of(path: Path) -> Names:
    return dict(names_in(tree_of(path).body))


def function_of(task: Task, path: Path) -> ast.FunctionDef:
    function = names_of(path).get(task.function)
    assert isinstance(function, ast.FunctionDef), f"{path} has no function {task.function}"
    return function


def contract(function: ast.FunctionDef) -> tuple[str, str | None, list[str]]:
    """Signature, docstring and decorators."""
    returns = ast.unparse(function.returns) if function.returns else "nothing"
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return f"({ast.unparse(function.args)}) -> {returns}", ast.get_docstring(function), decorators


def stubs(template: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a template that a learner writes."""
    return {
        name: statement
        for name, statement in names_of(template).items()
        if isinstance(statement, ast.FunctionDef) and isinstance(statement.body[-1], ast.Raise)
    }


def task_of_stub(template: Path, name: str) -> Task:
    """The task of a function; some have two: average_gradients_flat belongs to 1.10 as well."""
    raised = ast.unparse(stubs(template)[name].body[-1])
    found = re.search(r"Task (\d+\.\d+): ", raised)
    assert found, f"{template}, {name}: {raised} names no task"
    return COURSE.task(found[1])


def solution_of(template: Path) -> Path:
    return next(task.solution for task in TASKS if task.template == template)


@each_task
def test_template_and_solution_have_one_signature_and_one_docstring(task: Task) -> None:
    of_template = contract(function_of(task, task.template))
    assert of_template == contract(function_of(task, task.solution))
    assert of_template[1], f"{task.function} has no docstring"


@each_template
def test_what_a_learner_writes_has_the_contract_of_the_solution(template: Path) -> None:
    for name, stub in stubs(template).items():
        solved = names_of(solution_of(template))[name]
        assert isinstance(solved, ast.FunctionDef)
        assert contract(stub) == contract(solved), name


@each_template
def test_what_is_given_is_the_solution_word_for_word(template: Path) -> None:
    solved = names_of(solution_of(template))
    for name, given in names_of(template).items():
        assert name in solved, f"{template} has {name}, the solution has not"
        if name not in stubs(template):
            assert ast.dump(given) == of_templates(ast.dump(solved[name])), f"{template}: {name}"


def of_templates(dumped: str) -> str:
    """Let a solution import the templates, as a template does."""
    return re.sub(r"'solutions\.(phase\w+)\.(\w+)'", r"'\1.template_\2'", dumped)


@each_template
def test_every_public_name_of_the_solution_is_in_the_template(template: Path) -> None:
    public = {
        name
        for name in names_of(solution_of(template))
        if not any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    }
    assert public <= names_of(template).keys()


@each_template
def test_stub_is_a_todo_and_the_error_of_its_own_task(template: Path) -> None:
    listed = {name: task for task in TASKS if task.template == template for name in task.functions}
    assert listed.keys() == stubs(template).keys()
    for name, stub in stubs(template).items():
        task = task_of_stub(template, name)
        assert task == listed[name]
        assert len(stub.body) == 2, f"{name}: docstring and raise, nothing else"
        message = f"Task {task.id}: {name}, see {task.guide}"
        assert ast.unparse(stub.body[-1]) == f"raise NotImplementedError({message!r})"


def todos_of(template: Path) -> list[str]:
    text = (ROOT / template).read_text(encoding="utf-8")
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    return re.findall(r"# TODO (\d+\.\d+): (.*?lines)", " ".join(comments))


@each_template
def test_each_stub_has_one_todo_that_names_tools_a_worked_number_and_lines(template: Path) -> None:
    todos = todos_of(template)
    assert [id for id, _ in todos] == [task_of_stub(template, name).id for name in stubs(template)]
    for id, text in todos:
        for needed in ("Tools: ", "Example: ", "About "):
            assert needed in text, f"TODO {id} does not say {needed.strip()}"
    text = (ROOT / template).read_text(encoding="utf-8")
    assert text.count("# TODO") == text.count("NotImplementedError") == len(todos)


def imports_of(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


@each_template
def test_template_imports_what_the_solution_does_but_other_templates_for_solutions(
    template: Path,
) -> None:
    allowed = {
        re.sub(r"^solutions\.(\w+)\.", r"\1.template_", name)
        for name in imports_of(solution_of(template))
    }
    assert imports_of(template) <= allowed
    assert not any(name.startswith(("solutions", "distlab")) for name in imports_of(template))


def _told(ids: Sequence[str]) -> str:
    """Name tasks; those of another lesson may lie between them."""
    numbers = [int(task_id.split(".")[1]) for task_id in ids]
    if len(ids) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"Tasks {ids[0]} to {ids[-1]}."
    return f"{'Tasks' if len(ids) > 1 else 'Task'} {joined(ids)}."


@each_template
def test_template_begins_as_the_solution_does_and_names_its_tasks(template: Path) -> None:
    of_template, of_solution = (
        ast.get_docstring(tree_of(path)) or "" for path in (template, solution_of(template))
    )
    assert of_template.splitlines()[0] == of_solution.splitlines()[0]
    ids = [task.id for task in TASKS if task.template == template]
    assert _told(ids) in of_template
    assert f"distlab check {ids[0]}``" in of_template


def call_without_arguments(function: Callable[..., object]) -> None:
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
    ]
    by_place = [None for parameter in needed if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    by_name = [parameter.name for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY]
    function(*by_place, **dict.fromkeys(by_name))  # *args and **kwargs may be left out


@each_template
def test_template_imports_without_effect_and_its_stubs_raise(template: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        module = importlib.import_module(".".join(template.with_suffix("").parts))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert (output.getvalue(), states, dist.is_initialized()) == ("", after, False)
    for name in stubs(template):
        function = module
        for part in name.split("."):
            function = getattr(function, part)
        task = task_of_stub(template, name)
        with pytest.raises(NotImplementedError, match=re.escape(f"Task {task.id}: {name}, see")):
            call_without_arguments(function)


# --- files ---------------------------------------------------------------------------------------


def files_in(folder: Path) -> set[str]:
    """All but what tools leave behind."""
    left_behind = ("__pycache__", ".ipynb_checkpoints", ".DS_Store")
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix()
        for path in paths
        if not any(part in left_behind for part in path.parts)
    }


# What else lies beside the solutions: the production system, which uses them.
PRODUCTION = {4: ("README.md", "deployment/", "imagenet_trainer.py")}


@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)
def test_nothing_is_missing_and_nothing_stray_lies_in_a_phase(phase: Phase) -> None:
    folder = ROOT / phase.folder
    lessons = {lesson.name for lesson in phase.lessons}
    lessons |= {phase.challenge.lesson} if phase.challenge else set()
    figures = {path.name for path in folder.glob("figures/*")}
    expected = {
        "guidelines.md",
        "explore.ipynb",
        "given.py",
        *(path.name for path in folder.glob("programs.py")),  # if the lessons have a ``main``
        *(f"template_{name}.py" for name in lessons),
    }
    expected |= {f"figures/{name}" for name in figures if Path(name).suffix in (".svg", ".png")}
    assert files_in(folder) == expected
    solved = {f"{name}.py" for name in lessons} | {"__init__.py"}
    there = files_in(ROOT / "solutions" / phase.folder)
    assert {
        path for path in there if not path.startswith(PRODUCTION.get(phase.number, ()))
    } == solved


@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)
def test_a_notebook_is_run_by_make_test_and_stored_without_outputs(phase: Phase) -> None:
    path = f"{phase.folder}/explore.ipynb"
    assert path in (ROOT / "Makefile").read_text(encoding="utf-8").split()
    cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"]] == []


# --- the grading ---------------------------------------------------------------------------------

SUITES = {phase: ROOT / f"tests/phase{phase.number}" for phase in COURSE.phases}


@pytest.mark.skipif(not all(map(Path.exists, SUITES.values())), reason="no grading suite yet")
@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda phase: phase.folder)
def test_every_task_is_graded_and_nothing_that_is_no_task(phase: Phase) -> None:
    judges = {file.stem: file.read_text(encoding="utf-8") for file in SUITES[phase].glob("judge_*")}
    marked = re.findall(r"\btask\(\"([\d.]+)\"", "".join(judges.values()))
    assert set(marked) == {task.id for task in phase.tasks}
    suite = f"tests/test_phase{phase.number}.py"
    text = (ROOT / suite).read_text(encoding="utf-8")
    collected = re.findall(rf"^from phase{phase.number}\.(\w+) import \*$", text, re.MULTILINE)
    assert not judges.keys() - set(collected), f"{suite} does not import these"
    assert not set(collected) - judges.keys(), f"{suite} imports what is not there"
