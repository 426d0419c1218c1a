"""Code that phase 4 gives you: types, and functions from other phases that its lessons use.

It contains no tasks, so leave it as it is: submissions are graded with the course's own copy.
"""

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks


class Loaded(NamedTuple):
    """A loaded checkpoint, and the newer ones that were skipped."""

    step: int
    state: dict[str, Any]
    path: Path
    skipped: dict[Path, str]  # newer, damaged checkpoint -> what is wrong with it


EXIT_STOPPED = 75  # EX_TEMPFAIL in sysexits.h: nothing is wrong, so run it again


def group_device(group: Group = None) -> torch.device:
    """Return the device for tensors sent in ``group``: this rank's GPU with NCCL, else the CPU."""
    has_nccl = dist.get_backend(group) == "nccl" or "cuda:nccl" in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")


class Shard(NamedTuple):
    """Elements ``start`` to ``start + len(values)`` of a flattened tensor."""

    values: Tensor  # (n,); n may be 0
    start: int
    numel: int  # elements of the whole tensor


class ShardsLoaded(NamedTuple):
    """A checkpoint whose shards were loaded, and the newer ones that were skipped."""

    step: int
    path: Path
    skipped: dict[Path, str]  # newer, damaged checkpoint -> what is wrong with it


Status = Literal["alive", "waiting", "slow", "silent"]


class Health(NamedTuple):
    """A monitor's view of a rank."""

    rank: int
    step: int  # step of its last report; -1 before the first
    silent_s: float  # time since that report was seen
    status: Status


class Store(Protocol):
    """The methods of a torch.distributed store, such as a TCPStore, that the lessons use."""

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key, replacing any older one."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key; wait until it has one, or raise after the store's timeout."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values, without waiting."""


class HasState(Protocol):
    """An object with a state to save and load: a model, optimizer, scheduler, scaler or sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors may be the ones that training changes."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load a state that another object of this kind has returned."""


class Job(Protocol):
    """A training job: a model, its optimizer, and whatever belongs to them."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to continue; it may share memory with the job.

        The state is sent to other ranks, where GPU tensors would arrive on the GPU with the same
        number, so return CPU copies of GPU tensors. One rank may call this alone, so no collectives
        are called here.
        """

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a state."""

    def parameters(self) -> Iterable[Tensor]:
        """Return the trained parameters, in the same order on all ranks."""

    def add_gradients(self, samples: Sequence[int], epoch: int, /) -> None:
        """Add the gradients of the loss, summed over these samples, to each ``.grad``.

        Like ``backward``, it creates missing gradients and clears none.

        Args:
            samples: indices of the samples, at least one.
            epoch: current epoch, which together with the sample determines the augmentation.
        """

    def step(self) -> None:
        """Update the parameters with the gradients in ``.grad``, which stay unchanged."""


class Reduced(NamedTuple):
    """Result of averaging a gradient over the ranks in compressed form.

    ``mean`` is the mean over all ranks of what they ``sent``. The rest of each rank's gradient was
    not sent.
    """

    mean: Tensor  # (n,); the same on all ranks, bit for bit
    sent: Tensor  # (n,); the part of its gradient that this rank sent


class Piece(NamedTuple):
    """The gradient of one parameter, in a flat tensor that holds several gradients."""

    name: str  # name of the parameter
    shape: torch.Size


# Gets flat gradients, which the caller may overwrite after the call, and the pieces in them.
Reduce = Callable[[Tensor, Sequence[Piece]], Reduced]


class Codec(Protocol):
    """Encodes numbers in fewer bits."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes, uint8 of shape (b,), and the scale, float32 of shape ().

        b depends only on the length of x, and grows with it.
        """

    def decode(self, payload: Tensor, scale: Tensor, n: int) -> Tensor:
        """Return the n numbers that the codes represent, in float32; ignore padding at the end."""


Part = Literal["data", "compute", "communication"]  # part of a step


class StepTimes(NamedTuple):
    """Breakdown of a step's time, on one rank."""

    step_s: float
    data_s: float  # wait for the next batch
    compute_s: float
    communication_s: float  # wait for the network, excluding what overlaps with computation

    @property
    def rest_s(self) -> float:
        """Time outside the three parts, such as for logging."""
        return self.step_s - self.data_s - self.compute_s - self.communication_s


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int  # its rank in the group that is watched
    part: Literal["data", "compute"]  # the part that is slow
    ratio: float  # its own work divided by that of the median rank; 1 is normal


class Started(Protocol):
    """An operation in progress, such as torch's ``Work`` or a future of torch.futures."""

    def wait(self) -> Any:
        """Wait until the result of the operation can be used."""


class MetricWriter(Protocol):
    """A destination for the metrics of a run.

    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.write({"loss": 2.5, "samples_total": 4096}, step=1)
    """

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Write what is still buffered, and release files, threads and ports."""


class Record(NamedTuple):
    """Metrics of a step."""

    step: int
    metrics: dict[str, float]


# Task 4.17: a page for Prometheus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # by it, Prometheus knows the format
CLOSE_S = 0.05  # interval at which the server checks whether to stop
REQUEST_S = 5.0  # how long a client may stay connected without sending anything


class PageServer:
    """Serves a page at ``/metrics``, in a daemon thread that prints nothing.

    Attributes:
        port: port in use.
    """

    def __init__(self, page: Callable[[], bytes], port: int = 0, host: str = "127.0.0.1") -> None:
        """Start serving. Any other path is answered with 404; anything after a ``?`` is ignored.

        Args:
            page: function that returns the page. It is called for each request, in a thread of that
                request, while the caller's own thread goes on.
            port: port to listen on; 0 for any free one.
            host: address to listen on; the default is for clients on this machine alone.

        Raises:
            OSError: the server cannot listen. The message names the host, the port and the system's
                reason, and says what to do.
        """
        try:
            self._server = _Server((host, port), _handler_of(page))
        except (OSError, OverflowError) as error:  # OverflowError: no such port exists
            raise OSError(f"no metrics at {host}:{port} ({error}). {_advice(error)}") from error
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(CLOSE_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; when this returns, the port is free.

        A thread that serves a client ends when the client leaves, or says nothing for REQUEST_S.
        """
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Answers each client in its own thread."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a client that leaves before it is answered does not harm training."""


def _advice(error: Exception) -> str:
    """Return what to do about an address on which the server can't listen."""
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return (
            "Another process listens there, perhaps another rank. Give each rank a port of its "
            "own, such as 9400 + its local rank, or 0 for any free port."
        )
    return (
        "Check that the host is an address of this machine, and that this user may take the port: "
        "1024 to 65535, or 0 for any free one."
    )


def _handler_of(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    """Return a class that answers requests with the current page."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = page() if is_known else b"metrics are at /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a request every 15 s would fill the log."""

    return Handler


# Profiles


class Exposed(NamedTuple):
    """Communication time in a step, averaged over the steps of a trace."""

    step_s: float
    communication_s: float  # time in which any communication is in progress
    exposed_s: float  # part of that time in which nothing is computed
