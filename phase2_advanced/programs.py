"""Code that the lessons' ``main`` functions share: a model and data, a meter, and printing.

It contains no task, so leave it as it is.
"""

import argparse
import copy
import dis
import inspect
import os
import re
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

# Imported before there is a process group. Otherwise, the first optimizer would import it, its
# functions would keep the group as their default, the group would never be destroyed, and its
# threads might abort the process at exit (torch 2.13).
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from phase2_advanced.given import Batch, group_device

NUM_ROWS = 512  # number of images to train on
MAX_COLUMNS = 80  # maximum width of a drawing; wider ones are folded
PORTS = range(15_000, 30_000)  # below the ports that the system assigns to clients

# torchrun's environment variables, and the names that the mpirun of MPICH and that of Open MPI use
# for the same values.
MPIRUN = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


def join() -> None:
    """Join the ranks that torchrun, mpirun or ``distlab sim`` has started.

    The ranks compute on GPUs and use NCCL if this machine has a GPU for each of its ranks.
    Otherwise, they compute on the CPU and use gloo.

    If mpirun has started ranks on several machines, MASTER_ADDR and MASTER_PORT must say where to
    reach rank 0. On a single machine, the ranks use a port derived from their parent's process id.

    Raises:
        ValueError: none of these launchers has started this process, or rank 0's address is not
            known.
    """
    if "RANK" not in os.environ:
        os.environ.update(_from_mpirun())
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        dist.init_process_group("gloo")
        return
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)  # NCCL connects the ranks here, not in a step


def _from_mpirun() -> dict[str, str]:
    """Return values from mpirun for torchrun's variables that are not set."""
    known = {
        name: os.environ[theirs]
        for name, both in MPIRUN.items()
        for theirs in both
        if theirs in os.environ
    }
    if "RANK" in known and known["WORLD_SIZE"] == known.get("LOCAL_WORLD_SIZE"):
        port = PORTS[os.getppid() % len(PORTS)]
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: text for name, text in known.items() if name not in os.environ}


def load_digits(rows: int = NUM_ROWS) -> Batch:
    """Return the first of scikit-learn's digits: pixels (rows, 64) from 0 to 1 and labels (rows,).

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = find_spec("sklearn")  # finds its data file without an import, which takes a second
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", max_rows=rows)).to(group_device())
    return table[:, :-1] / 16, table[:, -1].long()


def digit_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return the layers of a digit classifier, in float64 and the same on every rank.

    As in a transformer, each layer is four times as wide inside as at its input, except for the
    last, which is linear.

    Args:
        widths: width of each layer's input; the last layer returns 10 logits.
    """
    torch.manual_seed(0)
    layers = [
        nn.Sequential(_linear(m, 4 * m), nn.Tanh(), _linear(4 * m, n)) for m, n in pairwise(widths)
    ]
    return [*layers, _linear(widths[-1], 10)]


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, dtype=torch.float64)
    nn.init.xavier_normal_(layer.weight)  # torch's default is too small for so many tanh layers
    return layer.to(group_device())


def num_parameters(module: nn.Module) -> int:
    """Return the number of elements in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """Return the programs' optimizer, whose steps do not depend on how a model is split."""
    return torch.optim.Adam(module.parameters(), lr=0.003)


def train(model: nn.Module, num_steps: int) -> list[float]:
    """Train without a pipeline, on all of ``load_digits`` in each step, and return the losses."""
    (images, labels), optimizer = load_digits(), optimizer_for(model)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(model: nn.Module, num_steps: int) -> None:
    """Train on rank 0 as one process would, and broadcast the weights to all ranks."""
    if dist.get_rank() == 0:
        train(model, num_steps)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def require_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Call ``fail`` on all ranks unless every rank's weights equal those that one process trained.

    Args:
        ours: this rank's weights, in float64.
        theirs: the corresponding weights of the model that one process trained.
    """
    pairs = [(x.detach(), y.detach()) for x, y in zip(ours, theirs, strict=True)]
    ok = all(torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in pairs)
    wrong = [rank for rank, is_ok in enumerate(from_all_ranks(ok)) if not is_ok]
    if wrong:
        fail(f"after training, the weights of ranks {wrong} are not those of one process")


def compare_with_one_process(
    ours: nn.Module, widths: Sequence[int], layers: Iterable[int], num_steps: int
) -> None:
    """Train in one process too; call ``fail`` on all ranks unless the weights are equal.

    Args:
        ours: the layers of ``digit_layers(widths)`` that this rank has trained.
        layers: indices of these layers in the model.
    """
    alone = digit_layers(widths)
    train_alone(nn.Sequential(*alone), num_steps)
    require_equal(ours.parameters(), (x for i in layers for x in alone[i].parameters()))


def from_all_ranks(number: float) -> list[float]:
    """Return every rank's ``number``, on all ranks."""
    mine = torch.tensor([number], dtype=torch.float64, device=group_device())
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    return [float(other) for other in numbers]


def by_rank(number: float, form: str = ",.0f") -> str:
    """Return every rank's ``number`` as text; all ranks must call this."""
    return "  ".join(format(other, form) for other in from_all_ranks(number))


def in_bands(drawing: str, cell: int) -> str:
    """Fold a drawing that is wider than a terminal into bands, one below the other.

    Args:
        drawing: rows of cells.
        cell: width of a cell in characters, including the gap after it.
    """
    rows, width = drawing.splitlines(), MAX_COLUMNS // cell * cell
    starts = range(0, max(map(len, rows)), width)
    return "\n\n".join(
        "\n".join(row[start : start + width].rstrip() for row in rows) for start in starts
    )


def say(text: str) -> None:
    """Print a line on rank 0 only, because lines from several processes would mix."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_loss(first: float, last: float) -> None:
    """Print the first and the last loss, after ``require_equal`` has passed."""
    say(f"loss:                 {first:.3f} -> {last:.3f}, and the weights of one process")


def fail(problem: object) -> NoReturn:
    """End the program on all ranks, which must all call this; rank 0 prints why, in one line."""
    if dist.get_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    dist.barrier()  # the first rank to exit ends all others, so rank 0 must print first
    dist.destroy_process_group()
    raise SystemExit(1) from None


def require_written(*functions: Callable[..., Any]) -> None:
    """Call ``fail`` on all ranks if a function is still a TODO; all ranks must call this."""
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None)
        for instruction in dis.get_instructions(code) if code else ():
            found = re.match(r"Task (\d+\.\d+): ([\w.]+), see ", str(instruction.argval))
            if found:  # the compiled code contains the TODO's error, so it can be reached
                task, name = found.groups()
                fail(f"this needs {task} {name}, which is not written yet: distlab check {task}")


def positive(text: str) -> int:
    """Return the number in the text of an option, which must be 1 or more.

    Raises:
        argparse.ArgumentTypeError: the number is below 1, or not a whole number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


class Checkpointed(nn.Module):
    """Calls a module through ``checkpoint``."""

    def __init__(self, module: nn.Module, checkpoint: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.checkpoint = module, checkpoint

    def forward(self, *inputs: Tensor) -> Any:
        return self.checkpoint(self.module, *inputs)


def checkpointed(
    chunks: Sequence[nn.Sequential],
    checkpoint: Callable[..., Any],
    train_step: Callable[[list[nn.Sequential]], "Meter"],
) -> list[nn.Sequential]:
    """Print how much a step keeps without checkpoints; return the chunks, each layer checkpointed.

    Args:
        chunks: this rank's chunks, which share their parameters with the result.
        checkpoint: the function from task 2.5.
        train_step: function that trains a copy of the chunks for one step, and returns its meter.
    """
    require_written(checkpoint)
    say("without checkpointing, in one step:")
    report(train_step(copy.deepcopy([*chunks])))
    say("with it:")
    return [nn.Sequential(*(Checkpointed(x, checkpoint) for x in chunk)) for chunk in chunks]


class Meter:
    """Measures the time and the memory that training steps take on a rank.

    Attributes:
        total_s: time of all steps, by the clock of ``time.perf_counter``.
        busy_s: part of this time in which ``modules`` computed, forward and backward. During the
            remaining time, the rank sent, received or waited.
        peak_bytes: largest number of bytes that autograd kept for backward passes at any time, not
            counting parameters, which are in memory in any case.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.total_s = self.busy_s = self._since = 0.0
        self.peak_bytes = self._bytes = 0
        self._keepers: Counter[int] = Counter()  # number of ``_Kept`` objects by memory address
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._start())
            module.register_forward_hook(self._after_forward)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._add())
        self._parameters = {parameter.data_ptr() for parameter in parameters}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the forward and backward passes of a step."""
        start = time.perf_counter()
        with saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield
        self.total_s += time.perf_counter() - start

    def _start(self) -> None:
        self._since = time.perf_counter()

    def _add(self) -> None:
        now = time.perf_counter()
        self.busy_s, self._since = self.busy_s + now - self._since, now

    def _after_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._add()
        if output.requires_grad:
            output.register_hook(lambda _: self._start())  # backward enters the module

    def _keep(self, x: Tensor) -> "_Kept":
        kept = _Kept(x.detach())
        if x.data_ptr() not in self._parameters:
            self._bytes += 0 if self._keepers[x.data_ptr()] else x.nbytes
            self._keepers[x.data_ptr()] += 1
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            weakref.finalize(kept, self._free, x.data_ptr(), x.nbytes)
        return kept

    def _free(self, address: int, num_bytes: int) -> None:
        self._keepers[address] -= 1
        self._bytes -= 0 if self._keepers[address] else num_bytes


@dataclass(eq=False)
class _Kept:
    """A tensor that autograd keeps until the graph is freed."""

    tensor: Tensor


def report(meter: Meter) -> None:
    """Print how much the ranks kept for backward passes, and how long they sent or waited."""
    waited = 1 - meter.busy_s / meter.total_s
    say(f"kept for backward:    {by_rank(meter.peak_bytes / 1000)} kB at most")
    say(f"waited or sent:       {by_rank(waited, '.0%')} of the time")


@contextmanager
def calls_of(function: Callable[..., Any]) -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments of this rank's calls to a Python function, even in backward passes."""
    calls, code = [], inspect.unwrap(function).__code__

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        with set_multithreading_enabled(False):  # run backward passes in this thread, even on a GPU
            yield calls
    finally:
        sys.setprofile(before)
