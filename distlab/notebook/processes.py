"""The processes of real ranks: ipyparallel's engines on this machine, one for each rank."""

import contextlib
import logging
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from traitlets.config import Config

from distlab.notebook import watched
from distlab.production.evidence import FLIGHT_RECORDER
from distlab.util.text import signal_name

QUIET = logging.getLogger(f"{__name__}.quiet")  # ipyparallel would print each end of a process
QUIET.setLevel(logging.CRITICAL + 1)


# Engines can be called after two heartbeats; whether they live is known without.
CONTROLLER = [
    "--usethreads",
    "--HeartMonitor.period=100",
    "--HeartMonitor.max_heartmonitor_misses=100000",
]
ENGINE = ["--IPEngine.enable_nanny=False", "--IPEngine.max_heartbeat_misses=0"]
START_S = 60.0  # longest time for the start of engines
REAP_S = 1.0  # longest time until ipyparallel knows how an engine has ended
TICK_S = 0.02


class Processes:
    """Engines, numbered as the ranks are.

    Args:
        num_ranks: Number of engines.
        mpirun: Command that starts them, for ranks of MPI, or None.

    Attributes:
        folder: Folder for files of the cluster.

    Raises:
        ValueError: They could not be started.
    """

    def __init__(self, num_ranks: int, mpirun: str | None = None) -> None:
        self._num_ranks, self._is_mpi = num_ranks, mpirun is not None
        self._temporary = tempfile.TemporaryDirectory(prefix="distlab-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self._cluster = ipyparallel.Cluster(
            engines="mpi" if mpirun else "local",
            config=_config(self.folder, mpirun),
            log=QUIET,
            profile_dir=str(self.folder / "profile"),
            load_profile=False,
            controller_args=CONTROLLER,
            shutdown_atexit=False,  # they watch this process
        )
        self._client: ipyparallel.Client | None = None
        self._engines: dict[int, int] = {}  # by rank
        self._processes: dict[int, psutil.Process] = {}
        self._launchers: dict[int, Any] = {}  # ipyparallel's, by process id; none with MPI
        try:
            self._cluster.start_controller_sync()
            self._client = self._cluster.connect_client_sync()
            self._start(range(num_ranks))
        except BaseException as error:  # KeyboardInterrupt, too
            self.close()
            if isinstance(error, Exception):
                raise ValueError(f"the processes did not start: {error}") from error
            raise

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a rank's process; return ipyparallel's AsyncResult."""
        assert self._client is not None
        return self._client[self._engines[rank]].apply_async(function, *args)

    def calls(self, ranks: Collection[int], *call: Any) -> dict[int, Any]:
        """Call a function with arguments in the processes of ranks."""
        return {rank: self.call(rank, *call) for rank in ranks}

    def dead(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        return {r for r, process in self._processes.items() if not watched.is_alive(process)}

    def killer(self, rank: int) -> str:
        """Return the signal that has ended a rank's process; "" if none did, or with MPI."""
        if (launcher := self._launchers.get(self._processes[rank].pid)) is None:
            return ""
        launcher._wait_thread.join(REAP_S)  # only one waiting thread is told the exit code
        with contextlib.suppress(psutil.TimeoutExpired):  # other threads of the process still run
            code = launcher.process.wait(REAP_S) or 0
            return signal_name(-code) if code < 0 else ""
        return ""

    def signal(self, ranks: Collection[int], number: int) -> None:
        """Send a signal to those of the ranks that are alive."""
        for rank in {*ranks} - self.dead():
            self._processes[rank].send_signal(number)

    def replace_dead(self) -> set[int]:
        """Start processes in place of those that have ended; return their ranks.

        With MPI, all ranks begin anew, because a job loses all ranks with one of them.
        """
        dead = self.dead()
        if dead and self._is_mpi:
            dead = {*range(self._num_ranks)}
            self.signal(dead, signal.SIGKILL)
        if dead:
            self._start(dead)
        return dead

    def _start(self, ranks: Collection[int]) -> None:
        assert self._client is not None
        before = {*self._client.ids}
        engines = self._cluster.engines[self._cluster.start_engines_sync(len(ranks))]
        started = getattr(engines, "launchers", {}).values()
        self._launchers |= {launcher.pid: launcher for launcher in started}
        end_s = time.monotonic() + START_S
        while len(new := {*self._client.ids} - before) < len(ranks):
            if time.monotonic() > end_s:
                raise ValueError(f"{len(new)} of {len(ranks)} answer after {START_S:g} s")
            time.sleep(TICK_S)
        places = self._client[[*new]].apply_async(watched.place).get(START_S)
        by_mpi = sorted(zip(places, new, strict=True))
        for rank, ((_, pid), engine) in zip(sorted(ranks), by_mpi, strict=True):
            self._engines[rank] = engine
            self._processes[rank] = psutil.Process(pid)

    def close(self) -> None:
        """End the processes."""
        self.signal(self._processes, signal.SIGKILL)  # they may wait where SIGTERM is not heard
        if self._client is not None:
            self._client.close()
        self._cluster.stop_cluster_sync()
        self._temporary.cleanup()


def _config(folder: Path, mpirun: str | None) -> Config:
    config = Config()
    config.LocalProcessLauncher.environment = {
        "IPYTHONDIR": str(folder),
        "TORCH_FR_BUFFER_SIZE": FLIGHT_RECORDER,
    }
    config.LocalEngineSetLauncher.delay = 0.0
    config.ControllerLauncher.controller_cmd = watched.command("ipyparallel.controller")
    config.EngineLauncher.engine_cmd = watched.command("ipyparallel.engine")
    config.EngineLauncher.engine_args = ENGINE
    config.MPILauncher.mpi_cmd = [mpirun or ""]
    return config
