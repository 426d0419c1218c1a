"""What the ``main`` functions of the lessons share: a model and data, a meter, and lines to print.

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

# The first optimizer loads this module, whose functions then keep the process group of that moment
# as their default: it is not destroyed, and its threads may abort the process as it ends (2.13).
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from phase2_advanced.given import Batch, group_device

NUM_ROWS = 512  # rows of the data
MAX_COLUMNS = 80  # columns of a drawing
PORTS = range(15_000, 30_000)  # below those that the system gives to clients

# What torchrun calls who a process is, and what the mpirun of MPICH and of Open MPI call it.
MPIRUN = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


def join() -> None:
    """Join the ranks that torchrun, mpirun or ``distlab sim`` has started.

    They compute on GPUs and use NCCL if this machine has a GPU for each of its ranks. Otherwise
    they compute on the CPU and use gloo.

    Those of mpirun on several machines need to be told where rank 0 is, by MASTER_ADDR and
    MASTER_PORT. On one machine, they meet at a port that the process which has started them all
    stands for.

    Raises:
        ValueError: nothing of the kind has started this process, or the address is not known.
    """
    if "RANK" not in os.environ:
        os.environ.update(_from_mpirun())
    dist.init_process_group(_backend())


def _backend() -> str:
    """Return the name of the backend; with NCCL, take this rank's GPU."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "nccl"


def _from_mpirun() -> dict[str, str]:
    """Return torchrun's variables; none that mpirun does not know."""
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
    """Return the first of scikit-learn's digits: pixels (rows, 64) from 0 to 1, labels (rows,).

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    spec = find_spec("sklearn")  # only its file is needed: importing it takes a second per rank
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", max_rows=rows)).to(group_device())
    return table[:, :-1] / 16, table[:, -1].long()


def digit_layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return the layers of a classifier of digits, in float64 and the same on every rank.

    As in a transformer, a layer is four times as wide inside as its input; the last is linear.

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
    nn.init.xavier_normal_(layer.weight)  # torch's own is too small for many layers with tanh
    return layer.to(group_device())


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers a module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all programs: its steps are the same for a model and its parts."""
    return torch.optim.Adam(module.parameters(), lr=0.003)


def train(model: nn.Module, num_steps: int) -> list[float]:
    """Train on all digits of ``load_digits`` at once, without pipeline; return the losses."""
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
    """Train on rank 0 as one process would, and give all ranks its weights."""
    if dist.get_rank() == 0:
        train(model, num_steps)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def require_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """``fail`` on all ranks unless every rank's weights are those of one process.

    Args:
        ours: this rank's weights, in float64.
        theirs: the same weights of the model that one process has trained.
    """
    pairs = [(x.detach(), y.detach()) for x, y in zip(ours, theirs, strict=True)]
    ok = all(torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in pairs)
    wrong = [rank for rank, is_ok in enumerate(from_all_ranks(ok)) if not is_ok]
    if wrong:
        fail(f"after training, the weights of ranks {wrong} are not those of one process")


def compare_with_one_process(
    ours: nn.Module, widths: Sequence[int], layers: Iterable[int], num_steps: int
) -> None:
    """``fail`` on all ranks unless every rank has the weights that one process would have.

    Args:
        ours: layers of ``digit_layers(widths)`` that this rank has trained.
        layers: the numbers of the layers in it.
    """
    alone = digit_layers(widths)
    train_alone(nn.Sequential(*alone), num_steps)
    require_equal(ours.parameters(), (x for i in layers for x in alone[i].parameters()))


def from_all_ranks(number: float) -> list[float]:
    """Return the number of each rank, on all ranks."""
    mine = torch.tensor([number], dtype=torch.float64, device=group_device())
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    return [float(other) for other in numbers]


def by_rank(number: float, form: str = ",.0f") -> str:
    """Write down the number of each rank; all ranks must call this."""
    return "  ".join(format(other, form) for other in from_all_ranks(number))


def in_bands(drawing: str, cell: int) -> str:
    """Fold a drawing that is wider than a terminal: one band of rows below the other.

    Args:
        drawing: its rows consist of cells.
        cell: characters of each of them, with the gap behind it.
    """
    rows, width = drawing.splitlines(), MAX_COLUMNS // cell * cell
    starts = range(0, max(map(len, rows)), width)
    return "\n\n".join(
        "\n".join(row[start : start + width].rstrip() for row in rows) for start in starts
    )


def say(text: str) -> None:
    """Print a line on rank 0 only: lines of several processes would mix."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_loss(first: float, last: float) -> None:
    """Print the first and the last loss, after ``require_equal``."""
    say(f"loss:                 {first:.3f} -> {last:.3f}, and the weights of one process")


def fail(problem: object) -> NoReturn:
    """End the program on all ranks, which must all call this; rank 0 says why in one line."""
    if dist.get_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    dist.barrier()  # the first rank that ends takes the others with it: rank 0 must have spoken
    dist.destroy_process_group()
    raise SystemExit(1) from None


def require_written(*functions: Callable[..., Any]) -> None:
    """``fail`` on all ranks, which must all call this, if a function is still a TODO."""
    for function in functions:
        code = getattr(inspect.unwrap(function), "__code__", None)
        for instruction in dis.get_instructions(code) if code else ():
            found = re.match(r"Task (\d+\.\d+): ([\w.]+), see ", str(instruction.argval))
            if found:  # a raise that can be reached
                task, name = found.groups()
                fail(f"this needs {task} {name}, which is not written yet: distlab check {task}")


def positive(text: str) -> int:
    """Read an option that must be 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is not.
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
    """Print what a step keeps without checkpoints; return the same layers with one around each.

    Args:
        chunks: this rank's; they keep their parameters and share them with the result.
        checkpoint: the function of task 2.6.
        train_step: measures a step of a copy of the chunks.
    """
    require_written(checkpoint)
    say("without checkpointing, in one step:")
    report(train_step(copy.deepcopy([*chunks])))
    say("with it:")
    return [nn.Sequential(*(Checkpointed(x, checkpoint) for x in chunk)) for chunk in chunks]


class Meter:
    """Measures what a rank does in its steps.

    Attributes:
        total_s: the time of all steps, by the clock of ``time.perf_counter``.
        busy_s: how much of it ``modules`` have computed, forward and backward. In the rest, the
            rank has sent, received and waited.
        peak_bytes: most bytes that autograd has kept at the same time for backward passes.
            Parameters do not count: they are there anyway.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.total_s = self.busy_s = self._since = 0.0
        self.peak_bytes = self._bytes = 0
        self._keepers: Counter[int] = Counter()  # number of keepers by address
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._start())
            module.register_forward_hook(self._after_forward)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self._add())
        self._parameters = {parameter.data_ptr() for parameter in parameters}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step: forward and backward passes."""
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
            output.register_hook(lambda _: self._start())  # then the backward pass comes here

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
    """What autograd keeps; it is freed with the graph."""

    tensor: Tensor


def report(meter: Meter) -> None:
    """Print what the ranks have kept for backward passes, and how long they have waited."""
    waited = 1 - meter.busy_s / meter.total_s
    say(f"kept for backward:    {by_rank(meter.peak_bytes / 1000)} kB at most")
    say(f"waited or sent:       {by_rank(waited, '.0%')} of the time")


@contextmanager
def calls_of(function: Callable[..., Any]) -> Iterator[list[dict[str, Any]]]:
    """List the arguments of all calls of a Python function by this rank, even in backward."""
    calls, code = [], inspect.unwrap(function).__code__

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            calls.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        with set_multithreading_enabled(False):  # backward in this thread, on a GPU too
            yield calls
    finally:
        sys.setprofile(before)
