"""One real rank of a notebook: what runs in its process, which ipyparallel has started.

A cell may wait in C code for a rank that has failed, where no exception reaches it. A thread hears
of SIGINT even then. It writes where the rank is, and closes the connections of the rank's groups:

    main thread     dist.barrier() · · · · · · · · · Connection closed by peer
    this thread                     SIGINT ─ closes ─┘

While a cell runs, the same thread sends the notebook what the cell has shown so far.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import psutil
import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython
from IPython.core.pylabtools import print_figure
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from distlab.launch.world import use_loopback
from distlab.notebook.cells import compiled
from distlab.notebook.failing import Failure
from distlab.notebook.idleness import Idleness
from distlab.notebook.output import RankOutput, route_displays, shown_in
from distlab.notebook.reloading import reload_changed
from distlab.production import evidence

if TYPE_CHECKING:  # its import takes long
    from matplotlib.figure import Figure

PERIOD_S = 0.25  # between two messages to the notebook
EVIDENCE_S = 1.0  # longest wait for the evidence of all ranks before the cell ends
TICK_S = 0.01
COMPLETE = "complete"  # name of a file beside the evidence once all ranks have left theirs
OUTPUT, IDLE = "output", "idle"  # keys of these messages


class Place(NamedTuple):
    """A rank among the others.

    Attributes:
        master: Address and port for programs that read torchrun's variables.
        folder: Folder of the cluster's files.
        join: Number of times that the ranks have joined before.
        path: Where Python looks for modules.
    """

    rank: int
    num_ranks: int
    backend: str
    master: tuple[str, int]
    folder: Path
    join: int
    path: list[str]


class Ended(NamedTuple):
    """What came of a cell on one rank.

    Attributes:
        output: What it has shown.
        failure: How it has failed, or None.
        has_left: True if the rank is not in the process group any more.
    """

    output: RankOutput
    failure: Failure | None
    has_left: bool


class Engine:
    """This process as a rank; its methods run in the main thread unless they say otherwise."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._output: RankOutput | None = None  # while a cell runs
        self._may_end = threading.Event()
        self._hang = Path()
        self._own = set[tuple[Any, ...]]()  # connections that are not those of the groups
        self._is_listening = False

    def join(self, place: Place) -> bool:
        """Join the other ranks, as under torchrun; called again after connections were closed.

        Returns:
            Whether earlier cells have made groups, or models that use them, which are gone now.
        """
        has_made, self.place = self._has_made_groups(), place
        os.environ.update(_torchrun(place))
        sys.path[:] = place.path
        if dist.is_initialized():
            dist.destroy_process_group()
        # A cell may have failed to join by itself, which counts as a group on this rank alone.
        dist.distributed_c10d._world.group_count = 0
        if not self._is_listening:
            self._is_listening = True
            self._listen()
        _init_process_group(place)
        self._joined_ns = time.time_ns()
        given = {"rank": place.rank, "world_size": place.num_ranks, "device": _device(place)}
        self.names.update(given, torch=torch, dist=dist)
        return has_made

    def _has_made_groups(self) -> bool:
        models = [x for x in self.names.values() if isinstance(x, DistributedDataParallel)]
        return len(dist.distributed_c10d._world.pg_map) > 1 or bool(models)

    def run(self, source: str, name: str, hang: Path) -> Ended:
        """Run a cell.

        Args:
            source: The cell.
            name: Its name.
            hang: Folder for the evidence if the cell is interrupted.
        """
        output, self._hang = RankOutput(), hang
        failure: Failure | None = None
        process = os.getpid()
        self._may_end.clear()
        signal.signal(signal.SIGINT, self._end_cell)  # a cell may have set another
        try:
            reload_changed(self.names)
            cell = compiled(source, name)
            with shown_in(output):
                self._output = output
                output.keep(cell.run(self.names))
        except BaseException as error:  # KeyboardInterrupt, too
            failure = Failure.of(error)
        finally:
            self._output = None
            if os.getpid() != process:  # a process that the cell has forked, and not ended
                os._exit(failure is not None)
        return Ended(output, failure, not dist.is_initialized())

    # SIGINT

    def _listen(self) -> None:
        """Handle SIGINT, also where the main thread does not."""
        shell: Any = get_ipython()
        route_displays(shell)
        pictures = shell.display_formatter.formatters["image/png"]
        pictures.for_type_by_name("matplotlib.figure", "Figure", _png)
        # Otherwise, the kernel would set its own handler for each call.
        shell.kernel.pre_handler_hook = shell.kernel.post_handler_hook = lambda: None
        # ipyparallel's handler would let the cell go on, and end the process after it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._own.update(_connections())
        read, self._write = socket.socketpair()
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        read.settimeout(PERIOD_S)
        threading.Thread(target=self._hear, args=(read,), name="distlab", daemon=True).start()

    def _end_cell(self, _: int, __: FrameType | None) -> None:
        if self._output is not None:
            self._may_end.wait(2 * EVIDENCE_S)
            raise KeyboardInterrupt

    def _hear(self, signals: socket.socket) -> None:
        """Interrupt the cell at SIGINT, and send its output otherwise, in a thread of its own."""
        sent, idleness = b"", Idleness()
        while True:
            try:
                number = signals.recv(1)[0]
            except TimeoutError:
                sent = self._send(sent, idleness)
            else:
                if number == signal.SIGINT and self._output is not None:
                    self._interrupt()

    def _interrupt(self) -> None:
        """Write where the rank is; once all ranks have done so, let its wait for others fail."""
        with contextlib.suppress(Exception):  # the cell must end all the same
            self.write_evidence(self._hang)
        end_s = time.monotonic() + EVIDENCE_S
        while not (self._hang / COMPLETE).exists() and time.monotonic() < end_s:
            time.sleep(TICK_S)
        self._may_end.set()
        if self.place.backend == "nccl":
            dist.distributed_c10d._abort_process_group()
        elif self.place.backend == "gloo":
            for number, *_ in _connections() - self._own:
                _shut_down(number)

    def write_evidence(self, hang: Path) -> None:
        """Write where the rank is, in any thread."""
        rank, size = self.place.rank, self.place.num_ranks
        evidence.write(hang, rank, size, has_sites=False, since_ns=self._joined_ns)

    def _send(self, sent: bytes, idleness: Idleness) -> bytes:
        """Send the notebook what is new of the cell; return what it has now."""
        if (output := self._output) is None:
            idleness.begin()
            return b""
        with contextlib.suppress(RuntimeError):  # it changes meanwhile
            data = {OUTPUT: pickle.dumps(output)}
            if data[OUTPUT] == sent:
                del data[OUTPUT]
            shell: Any = get_ipython()
            shell.data_pub.publish_data({**data, IDLE: idleness.span()})
            return data.get(OUTPUT, sent)
        return sent


def _torchrun(place: Place) -> dict[str, str]:
    rank, size, (address, port) = str(place.rank), str(place.num_ranks), place.master
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return known | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _init_process_group(place: Place) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as under torchrun: the ranks share the cores
    if place.backend == "mpi":
        from distlab.mpi import runtime, world

        runtime.runtime.cache_clear()  # what an interrupted cell has left unfinished stays behind
        world.init_process_group(None)
        return
    use_loopback()
    is_on_gpu = place.backend == "nccl"
    if is_on_gpu:
        torch.cuda.set_device(_device(place))
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.folder}/join{place.join}",
        rank=place.rank,
        world_size=place.num_ranks,
        device_id=_device(place) if is_on_gpu else None,
    )


def _device(place: Place) -> torch.device:
    return torch.device("cuda", place.rank) if place.backend == "nccl" else torch.device("cpu")


def _connections() -> set[tuple[Any, ...]]:
    """Return the process's connections as (number, own address, other address)."""
    tcp = psutil.Process().net_connections(kind="tcp")
    return {(c.fd, c.laddr, c.raddr) for c in tcp if c.status == psutil.CONN_ESTABLISHED}


def _png(figure: "Figure") -> str | None:
    picture: str | None = print_figure(figure, base64=True)
    return picture


def _shut_down(number: int) -> None:
    """Shut a connection down, whose descriptor stays with its owner."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


# What the notebook calls

_engine = Engine()


def join(place: Place) -> bool:
    """Join the other ranks."""
    return _engine.join(place)


def run(source: str, name: str, hang: Path) -> Ended:
    """Run a cell."""
    return _engine.run(source, name, hang)


def write_evidence(hang: Path) -> None:
    """Write which collectives the rank has called, though no cell runs on it."""
    _engine.write_evidence(hang)


def push(pickled: bytes) -> None:
    """Set variables."""
    _engine.names.update(pickle.loads(pickled))


def pull(name: str) -> bytes:
    """Return a variable's value, pickled; empty if there is none."""
    if name not in _engine.names:
        return b""
    value = _engine.names[name]
    value = value.detach().cpu() if isinstance(value, Tensor) else value
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def ask(question: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the variables and with arguments."""
    return question(_engine.names, *args)
