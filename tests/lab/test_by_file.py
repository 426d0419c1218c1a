"""Processes of pytest share the tests so that what the tests of a file share is made once."""

import os
from collections.abc import Callable

import fresh_pytest
import pytest
import torch

FIRST = ["lab/test_1.py::test_a", "lab/test_1.py::test_b[x::y]", "lab/test_1.py::test_c[1.1 z]"]
SECOND, NOTEBOOK = ["lab/test_2.py::test_a"], ["explore.ipynb::explore.ipynb"]
BANK = [
    "wrong_answers/test_bank.py::test_wrong[1.1 a]",
    "wrong_answers/test_bank.py::test_wrong[1.1 b]",
    "wrong_answers/test_bank.py::test_wrong[1.11 a]",
    "wrong_answers/test_bank.py::test_right[1.1 c]",
    "wrong_answers/test_bank.py::test_of_the_bank_itself",
]


class Process:
    """What a scheduler sees of a process that runs tests, here each as soon as it is given."""

    shutting_down = False

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given.append(numbers)

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def units(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Callable[[list[str]], list[list[str]]]:
    """What a process is given at a time, of tests with certain ids."""
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen"])
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False)

    def given(ids: list[str]) -> list[list[str]]:
        scheduler = pytestconfig.hook.pytest_xdist_make_scheduler(config=pytestconfig, log=None)
        process = Process()
        scheduler.add_node(process)
        scheduler.add_node_collection(process, ids)
        scheduler.schedule()
        for unit in process.given:  # more of them come meanwhile
            for number in unit:
                scheduler.mark_test_complete(process, number)
        assert process.shutting_down
        return [[ids[number] for number in unit] for unit in process.given]

    return given


def test_the_tests_of_a_file_stay_together(units: Callable[..., list[list[str]]]) -> None:
    mixed = [FIRST[0], *SECOND, *FIRST[1:], *NOTEBOOK]
    assert units(mixed) == [FIRST, SECOND, NOTEBOOK]


def test_the_bank_is_shared_task_by_task(units: Callable[..., list[list[str]]]) -> None:
    assert units(BANK) == [[*BANK[:2], BANK[3]], BANK[2:3], BANK[4:]]


def test_each_process_computes_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
        return
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended = fresh_pytest.run(f"{__file__}::{request.node.name}", "-n", "2")
    assert "1 passed" in ended.stdout, ended.stdout
