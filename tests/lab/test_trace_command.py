"""``distlab trace``: the task that it draws by default, and its message if it draws none."""

from pathlib import Path

import pytest
from commands import FILE, RIGHT, copy_course, distlab, grade_as, write_exchange

from distlab.learner import state, trace, trace_programs
from distlab.learner.folder import CourseFolder

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    monkeypatch.chdir(tmp_path)
    return copy_course(tmp_path)


def chosen(here: CourseFolder) -> str:
    task, why = trace_programs.choose(here, state.load(here))
    return f"{task.id}, {why}"


def test_the_default_is_the_last_graded_then_the_first_written_then_the_next(
    here: CourseFolder,
) -> None:
    assert chosen(here) == "1.3, the next"
    solution = here.root / here.task("1.3").solution
    (here.root / FILE).write_bytes(solution.read_bytes())
    assert chosen(here) == "1.3, which is written"
    grade_as(here, t1_7="failed")
    grade_as(here, t1_3="hang")
    assert chosen(here) == "1.3, the last one graded"
    grade_as(here, t1_7="passed")
    grade_as(here, t1_4="todo", t1_13="failed")
    assert chosen(here) == "1.7, the last one graded"


def test_every_program_has_its_body() -> None:
    assert trace_programs.PROGRAMS.keys() == trace.BODIES.keys()


def test_what_is_not_written_is_one_line(here: CourseFolder, capfd: Printed) -> None:
    assert distlab("trace") == 1
    line = f"1.3 exchange is not written yet: write it in {FILE}\n"
    assert capfd.readouterr() == (line, "")
    text = (here.root / FILE).read_text()
    mark = 'raise NotImplementedError(\n        "Task 1.6'
    assert mark in text
    calls_1_4 = text.replace(mark, "broadcast(x)\n    " + mark.replace("1.6", ""))
    (here.root / FILE).write_text(calls_1_4)
    assert distlab("trace", "1.6") == 1
    assert capfd.readouterr().out == f"1.4 broadcast is not written yet: write it in {FILE}\n"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    dist.send(outgoing, 99)\n", "template_collectives.py"),
        (
            "    sending = dist.isend(outgoing, dst)\n    dist.recv(incoming, src)\n"
            "    sending.wait()\n",
            # Messages start in NCCL's order here, as they do when the task is judged.
            "recv from rank 1 waits behind its isend to rank 1",
        ),
    ],
    ids=["error", "deadlock"],
)
def test_a_run_that_fails_is_reported_with_the_learners_lines_alone(
    here: CourseFolder, capfd: Printed, body: str, says: str
) -> None:
    write_exchange(here, body)
    assert distlab("trace", "1.3", "--ranks", "2") == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert says in printed
    assert "/distlab/" not in printed
    assert "trace.py" not in printed


def test_it_draws_what_the_function_sends_and_says_so(here: CourseFolder, capfd: Printed) -> None:
    write_exchange(here, RIGHT)
    grade_as(here, t1_3="hang")
    assert distlab("trace", "--ranks", "2") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "1.3 exchange, the last one graded:"
    assert "It does not hang here, on any rank: the tests hang in another case." in lines
    assert lines[-1] == "out/trace-1.3.png: who did what when"
    assert (here.root / "out/trace-1.3.png").read_bytes().startswith(b"\x89PNG")
