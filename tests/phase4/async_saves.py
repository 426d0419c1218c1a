"""Bodies for task 4.4: writes that are held, and training that continues meanwhile."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from judging.pretend_device import PretendDevice, device_of
from phase4.states import plain

HELD_S = 3.0  # longest wait of a write, so that a save that waits for its own write ends too
LATE_S = 0.3
TRAINING_S = 600.0
NUM_ELEMENTS = 100_000
FULL = "No space left on device"
FAILURES = {  # errors of writes, by the call that reports them
    "save": OSError(28, FULL),
    "wait": ValueError("the manifest is too long"),
    "with": RuntimeError("enforce fail at inline_container.cc"),
}


class Writer:
    """Notes what it is given to write; it may have to wait, and it may fail.

    Args:
        is_held: Whether each write waits for ``may_go``.
        fails: Steps whose writes raise, with their errors.
        keeps: Whether the writer keeps what it was given, or a copy without tensors.
    """

    def __init__(
        self,
        *,
        is_held: bool = False,
        fails: Mapping[int, Exception] | None = None,
        keeps: bool = True,
    ) -> None:
        self.fails, self.keeps = fails or {}, keeps
        self.steps: list[int] = []
        self.states: list[Any] = []
        self.is_daemon = self.is_callers_thread = self.was_held_too_long = False
        self.most_at_once = 0
        self.may_go = threading.Event()
        if not is_held:
            self.may_go.set()
        self._caller = threading.get_ident()
        self._at_once, self._lock = 0, threading.Lock()

    def __call__(self, state: Any, step: int) -> None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.is_daemon |= threading.current_thread().daemon
        self.is_callers_thread |= threading.get_ident() == self._caller
        self.was_held_too_long |= not self.may_go.wait(HELD_S)
        time.sleep(0.01)
        with self._lock:
            self._at_once -= 1
        if step in self.fails:
            raise self.fails[step]
        self.states.append(state if self.keeps else plain(state))
        self.steps.append(step)


def state_of_training() -> dict[str, Any]:
    """Return a state of all kinds."""
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    return {
        "model": {"weight": weight, "bias": torch.arange(8).bfloat16()[3:5]},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "losses": [2.5, 1.25],
        "position": (4, torch.tensor([7, 8])),
        "loss": weight.sum(),  # has a history
        "name": "run 3",
        "best": None,
    }


def change(state: dict[str, Any]) -> None:
    """Change everything in a state that can be changed in place."""
    with torch.no_grad():
        state["model"]["weight"].add_(1)
        state["model"]["bias"].zero_()
        state["position"][1].zero_()
        for value in state["optimizer"]["state"][0].values():
            value.mul_(5)
    state["optimizer"]["param_groups"][0]["lr"] = 9.0
    state["optimizer"]["param_groups"][0]["params"].append(1)
    state["losses"].append(0.0)
    state["name"] = "run 4"


def save_and_change(lesson: Any) -> dict[str, Any]:
    """Save, and change the state while the write is held."""
    writer, state = Writer(is_held=True), state_of_training()
    before = plain(state)
    saver = lesson.AsyncCheckpointer(writer)
    saver.save(state, 3)
    has_waited = writer.was_held_too_long or writer.is_callers_thread
    is_unchanged = plain(state) == before
    change(state)
    writer.may_go.set()
    saver.wait()
    written = plain(writer.states[0]) if writer.states else {}
    different = [name for name in before if written.get(name) != before[name]]
    return {
        "waited": has_waited,
        "unchanged": is_unchanged,
        "right": {name: before[name] for name in different},
        "written": {name: written.get(name) for name in different},
        "steps": writer.steps,
        "is_daemon": writer.is_daemon,
    }


def copy_of_a_slice(lesson: Any) -> tuple[int, list[str]]:
    """Save a slice, and a tensor of a device; return the bytes and the devices of the copies."""
    writer = Writer()
    with PretendDevice() as pretended, lesson.AsyncCheckpointer(writer) as saver:
        elsewhere = torch.ones(NUM_ELEMENTS).to(pretended)
        saver.save({"slice": torch.zeros(NUM_ELEMENTS)[:2], "elsewhere": elsewhere}, 1)
    tensors = writer.states[0].values()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), [str(device_of(tensor)) for tensor in tensors]


def save_four(lesson: Any) -> dict[str, Any]:
    """Save four steps as fast as possible."""
    writer = Writer(keeps=False)
    saver = lesson.AsyncCheckpointer(writer)
    tensor = torch.zeros(NUM_ELEMENTS)
    for step in (1, 2, 3, 4):
        saver.save({"x": tensor.fill_(step)}, step)
    saver.wait()
    values = [set(state["x"][-1]) for state in writer.states]
    return {"steps": writer.steps, "values": values, "most_at_once": writer.most_at_once}


def wait(lesson: Any) -> dict[str, Any]:
    """Return the steps that are written after ``wait`` and after with statements.

    Also whether an error comes out of a with statement.
    """
    steps, comes_out, writer = {}, False, Writer()
    saver = lesson.AsyncCheckpointer(writer)
    saver.wait()
    saver.save({"x": torch.ones(1)}, 1)
    saver.wait()
    steps["wait()"] = [*writer.steps]
    with lesson.AsyncCheckpointer(writer) as saver:
        saver.save({"x": torch.ones(1)}, 2)
    steps["the end of the with statement"] = [*writer.steps]
    try:
        with lesson.AsyncCheckpointer(writer) as saver:
            saver.save({"x": torch.ones(1)}, 3)
            raise ArithmeticError("in a step")
    except ArithmeticError:
        comes_out = True
    steps["an error inside of the with statement"] = [*writer.steps]
    return {"steps": steps, "comes out": comes_out}


def fail(lesson: Any, how: str) -> dict[str, Any]:
    """Save step 300, whose write fails; return the errors, and what is written afterwards."""
    writer = Writer(fails={300: FAILURES[how]})
    saver = lesson.AsyncCheckpointer(writer)
    saver.save({"x": torch.ones(1)}, 300)
    ways = {
        "save": lambda: saver.save({"x": torch.ones(1)}, 301),
        "wait": saver.wait,
        "with": lambda: saver.__exit__(None, None, None),
    }
    first, second = _raised(ways[how]), _raised(saver.wait)
    written = [*writer.steps]
    later = _raised(lambda: saver.save({"x": torch.ones(1)}, 302)) + _raised(saver.wait)
    errors = {"first": first or ["nothing", ""], "second": second, "later": later}
    return {**errors, "written": written, "afterwards": [*writer.steps]}


def _raised(call: Any) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def seconds(lesson: Any) -> dict[str, float]:
    """Let a save wait for the write before; return its own times, and the measured ones.

    After the second write training continues for long, on the clock of the simulated world.
    """
    writer = Writer(is_held=True)
    saver = lesson.AsyncCheckpointer(writer)
    facts = {"before": saver.snapshot_s + saver.write_s}
    saver.save({"x": torch.ones(1000)}, 1)
    begun_s = time.perf_counter()
    threading.Timer(LATE_S, writer.may_go.set).start()
    saver.save({"x": torch.ones(1000)}, 2)
    facts["save_s"] = time.perf_counter() - begun_s
    facts["write_s"] = saver.write_s
    facts["snapshot_s"] = saver.snapshot_s
    all_s = time.perf_counter() - begun_s
    time.sleep(TRAINING_S)
    saver.wait()
    return {**facts, "second_write_s": saver.write_s, "all_s": all_s}
