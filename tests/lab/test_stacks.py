"""Reading faulthandler's dumps, and the table of ranks made from them."""

import threading
from pathlib import Path

import torch.distributed.distributed_c10d as c10d

from distlab.launch import stacks, worker
from distlab.launch.stacks import Frame, Place, read_place, roll_call
from distlab.production import telemetry

LESSON = "/home/learner/course/collectives.py"


def dump(*frames: tuple[str, int, str], before: str = "") -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join(["main 0x7f01", before, "Thread 0x00007f01 (most recent call first):", *lines])


def test_the_operation_is_the_library_function_that_the_lesson_called() -> None:
    place = read_place(
        dump(
            (c10d.__file__, 2000, "wait_somewhere"),
            (c10d.__file__, 1990, "recv"),
            (c10d.__file__.replace("distributed_c10d", "c10d_logger"), 83, "wrapper"),
            (LESSON, 41, "exchange"),
            (LESSON, 12, "all_reduce"),
            (worker.__file__, 88, "_run"),
        )
    )
    assert place == Place("recv", Frame(LESSON, 41, "exchange"))
    assert str(place) == "in recv at collectives.py:41 in exchange"


def test_asking_for_the_rank_is_not_waiting() -> None:
    place = read_place(dump((c10d.__file__, 1, "get_rank"), (LESSON, 9, "loop")))
    assert str(place) == "at collectives.py:9 in loop"


def test_a_line_that_waits_for_a_request_is_waiting(tmp_path: Path) -> None:
    lesson = tmp_path / "ring.py"
    lesson.write_text("request = dist.irecv(x, src=0)\nrequest.wait()\n")
    assert read_place(dump((str(lesson), 2, "ring"))).operation == "wait()"
    assert read_place(dump((str(lesson), 1, "ring"))).operation == ""
    counted = (telemetry.__file__, 140, "counted")  # the trainer's own function inside ``wait``
    assert read_place(dump(counted, (str(lesson), 2, "ring"))).operation == "wait()"
    an_event = (threading.__file__, 9, "wait")
    assert read_place(dump(an_event, (str(lesson), 2, "ring"))).operation == ""


def test_other_threads_do_not_count() -> None:
    other = f'Thread 0x00007f99 (most recent call first):\n  File "{LESSON}", line 1 in other\n'
    place = read_place(dump((LESSON, 5, "mine"), before=other))
    assert place.frame == Frame(LESSON, 5, "mine")


def test_a_frame_without_a_line_is_named_by_its_function(tmp_path: Path) -> None:
    """Some instructions have no line number; for these, Python's dump says ``line ???``."""
    lesson = tmp_path / "tree.py"
    lesson.write_text("x = 1\n\ndef broadcast():\n    while True: x if x else 0\n")
    text = dump((str(lesson), 4, "broadcast")).replace("line 4", "line ???")
    assert str(read_place(text)) == "at tree.py:3 in broadcast"
    # Two functions now share the name, and the dump does not tell them apart.
    lesson.write_text(lesson.read_text() * 2)
    assert str(read_place(text)) == "at tree.py in broadcast"
    lesson.unlink()
    assert str(read_place(text)) == "at tree.py in broadcast"


def test_without_a_dump_the_place_is_unknown() -> None:
    for text in ("", "main 0x7f01\n", "garbage"):
        assert str(read_place(text)) == "at an unknown place: it did not answer"


def test_the_roll_call_groups_ranks_and_shows_their_lines(tmp_path: Path) -> None:
    lesson = tmp_path / "ring.py"
    lesson.write_text("dist.recv(inbox, left)\nwhile True: pass\n")
    waits = Place("recv", Frame(str(lesson), 1, "exchange"))
    loops = Place("", Frame(str(lesson), 2, "step"))
    assert roll_call({0: waits, 1: loops, 2: waits, 3: waits}, 4).splitlines() == [
        "3 of 4 wait in recv at ring.py:1 in exchange; rank 1 is at ring.py:2 in step",
        "  ranks 0, 2 and 3  ring.py:1  dist.recv(inbox, left)",
        "  rank 1            ring.py:2  while True: pass",
    ]


def test_one_rank_waits_and_several_wait() -> None:
    waits = Place("recv", Frame(LESSON, 1, "f"))
    assert roll_call({2: waits}, 3).startswith("rank 2 waits in recv at")


def test_a_folder_that_only_begins_like_a_given_one_is_the_programs() -> None:
    package = str(Path(stacks.__file__).parents[1])
    assert not stacks.is_of_program(f"{package}/demo.py")
    assert stacks.is_of_program(f"{package}_of_mine/demo.py")
    assert not stacks.is_of_program("/suite/phase1/body.py", ["/suite/phase1"])
    assert stacks.is_of_program("/suite/phase10/body.py", ["/suite/phase1"])
