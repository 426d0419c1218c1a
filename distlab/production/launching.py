"""Train a model as a configuration says, on all ranks of this node.

    distlab train --config configs/config.yaml
    distlab train --config configs/config.yaml --epochs 5 --num_gpus 4
    distlab train --config … --nodes 2 --node-rank 0 --rendezvous node0:29400
    distlab train --config … --backend sim --cluster dgx-h100            # on simulated GPUs
    distlab train --config … --dry-run --cluster dgx-h100 --nodes 4      # only predicts
    mpirun -np 4 python -m distlab train --config … --backend mpi

The same command continues where the last run stopped. Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 reach
all ranks of this node, which save and stop.

    --config FILE           the configuration; configs/digits_cnn.yaml by default
    --KEY VALUE             any key of the configuration, as listed below
    --impl mine             train with the lessons that you have written
    --dry-run               predict speed, memory and duration, by simulating a step
    --nodes N               how many machines; start the command on each of them (default: 1)
    --node-rank R           which machine this is, 0 to N-1; 0 hosts the rendezvous
    --rendezvous HOST:PORT  an address of node 0 that all nodes can reach, and a free port there
    --max-restarts K        how often to restart after a crash (default: 3)

Exit codes: 0 done · 75 stopped and saved, run it again · 78 the configuration or the data is wrong
69 another training holds run_dir, run it again later · 74 cannot save · 1 anything else
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import cuda
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from distlab import lessons
from distlab.chosen import NotThereError, find
from distlab.data import DataError
from distlab.launch import LaunchError, SetupError, run
from distlab.launch.launchers import launched
from distlab.launch.limits import num_cores
from distlab.production.config import Config, described_keys, split_arguments
from distlab.production.dry_run import print_prediction
from distlab.production.errors import EXIT_STOPPED, EXIT_WRONG, ConfigError
from distlab.production.lessons import find_lessons, unwritten_services, without
from distlab.production.program import config_of, ended, impl_of
from distlab.production.saving import say
from distlab.production.world import stop_signals

DRY_RUN = "--dry-run"
CRASHED = 1  # exit code after which a restart may help


class End(NamedTuple):
    """Exit code of a training run, and whether a signal ended the run."""

    code: int
    by_signal: bool = False


class Nodes(NamedTuple):
    """The machines of a training run: how many, which one this is, and where they rendezvous."""

    number: int
    rank: int
    rendezvous: str
    max_restarts: int


def launch(arguments: Sequence[str]) -> int:
    """Train on all ranks of this node, and return the trainer's exit code.

    torchrun exits with 1 whatever its workers return, so they write their code to
    ``run_dir``/exit_code. On one node, this function restarts a run that has crashed; on several
    nodes, torchrun does, because all nodes must rendezvous again. A wrong configuration is reported
    before anything is started.
    """
    if {"-h", "--help"} & {*arguments}:
        print(f"{__doc__}\nKeys of the configuration, with their defaults:\n{described_keys()}")
        return 0
    try:
        return _launch([word for word in arguments if word != DRY_RUN], DRY_RUN in arguments)
    except (ConfigError, DataError, NotThereError) as error:
        for line in str(error).splitlines():
            say(f"error: {line}")
        return EXIT_WRONG


def _launch(arguments: Sequence[str], is_dry_run: bool) -> int:
    given = split_arguments(arguments)
    if is_dry_run:
        number = _whole(given, "nodes", "1")
        for key in ("node_rank", "rendezvous", "max_restarts"):
            given.pop(key, None)
        print_prediction(config_of({**given, "backend": "sim"}), number)
        return 0
    nodes, impl = _nodes(given), impl_of(given)
    find(impl, ())  # says so if the course is not here at all, and with it its configurations
    config = config_of(given)
    find_lessons(impl, config)
    if (missing := without(unwritten_services(impl))) and os.environ.get("RANK", "0") == "0":
        say(missing)
    # Each option is one word, because a value may begin with dashes.
    words = [f"--{key}={value}" for key, value in given.items()]
    world = launched(config.backend) if nodes.number == 1 else None
    if world and world.launcher == "torchrun":
        return int(lessons.imagenet_trainer.main(words))
    if world or config.backend in ("sim", "mpi"):
        return train_in_world(config, impl, world.world_size if world else processes_of(config))
    return _train(config, nodes, words)


def train_in_world(config: Config, impl: str, num_ranks: int) -> int:
    """Train on simulated ranks, or join those of mpirun or srun; return the exit code.

    A rank that fails ends the others, and nothing is started anew.
    """
    if config.backend == "sim":  # ranks are threads of one process
        config = config.model_copy(update={"num_workers": 0, "tensorboard": False})
    world: dict[str, Any] = {"backend": config.backend, "device": config.device}
    try:
        codes = run(
            _on_rank, num_ranks, config, impl, **world, cluster=config.cluster, timeout_s=None
        )
    except LaunchError as error:
        say(f"error: {error}")
        return EXIT_WRONG if isinstance(error, SetupError) else CRASHED
    return max(codes)


def _on_rank(config: Config, impl: str) -> int:
    """Train, and return the exit code.

    A process leaves at once with a code that is not 0, because others may wait for this rank. A
    simulated rank can return it: then the simulator ends those that wait.
    """
    code, reason = ended(lambda: lessons.imagenet_trainer.train(config, find_lessons(impl, config)))
    for line in reason.splitlines():
        print(f"rank {dist.get_rank()}: error: {line}", file=sys.stderr, flush=True)
    if code and config.backend != "sim":
        sys.exit(code)
    return code


def _train(config: Config, nodes: Nodes, arguments: list[str]) -> int:
    processes = processes_of(config, nodes.number)
    for name, value in environment(processes).items():
        os.environ.setdefault(name, value)
    command = [*_torchrun_options(nodes, processes), "-m", lessons.trainer(), *arguments]
    restarts = nodes.max_restarts if nodes.number == 1 else 0
    for left in range(restarts, -1, -1):
        end = _run_once(command, config.run_dir / "exit_code")
        if end.code != CRASHED or end.by_signal or left == 0:
            break
        say(f"the training has crashed and is started anew; attempts left after this: {left - 1}")
    return end.code


def _run_once(command: list[str], left: Path) -> End:
    """Run torchrun in this process, so that signals reach it; return how the trainer ended."""
    left.unlink(missing_ok=True)
    by_signal = False
    try:
        torchrun.run(torchrun.parse_args(command))  # type: ignore[no-untyped-call]
        code = 0
    except ChildFailedError:
        code = CRASHED
    except SignalException:
        by_signal, code = True, EXIT_STOPPED  # applies if no rank had begun to train
    return End(int(left.read_text(encoding="utf-8")) if left.exists() else code, by_signal)


def _torchrun_options(nodes: Nodes, processes: int) -> list[str]:
    signals = ",".join(number.name for number in stop_signals())  # otherwise SIGUSR1 kills torchrun
    common = [f"--nproc-per-node={processes}", f"--signals-to-handle={signals}"]
    if nodes.number == 1:
        return ["--standalone", *common]
    return [
        *common,
        f"--nnodes={nodes.number}",
        f"--max-restarts={nodes.max_restarts}",
        "--rdzv-backend=c10d",
        "--rdzv-id=training",
        f"--rdzv-endpoint={nodes.rendezvous}",
        f"--rdzv-conf=is_host={nodes.rank == 0}",  # otherwise guessed from the host name
    ]


def environment(processes: int) -> dict[str, str]:
    """Return environment variables for torchrun and its workers.

    The first variable divides a node's cores among its ranks. Without the second, restarted workers
    would find their predecessors' addresses in torchrun's store, and fail once or twice.
    """
    threads = max(1, num_cores() // processes)
    return {"OMP_NUM_THREADS": str(threads), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def processes_of(config: Config, num_nodes: int = 1) -> int:
    """Return the number of ranks per node.

    It is ``num_gpus`` or, if that is auto, as many as ``parallelism`` needs. If that leaves ``dp``
    open, it is the number of GPUs. Without GPUs, it is the number of ranks of one replica, or two
    if a replica is one rank and there are two cores.
    """
    sizes = config.parallelism
    if config.num_gpus != "auto":
        return config.num_gpus
    if sizes.num_ranks:
        return -(-sizes.num_ranks // num_nodes)
    if config.device != "cpu" and config.backend != "sim" and cuda.is_available():
        return cuda.device_count()
    return max(min(2, num_cores()), sizes.pp * sizes.tp)


# The command line


def _nodes(given: dict[str, str]) -> Nodes:
    """Remove the node options, which the trainer does not have, and return them."""
    count = _whole(given, "nodes", "1")
    names = {"node_rank", "rendezvous"}
    if count > 1 and not names <= {*given}:
        raise ConfigError(
            f"--nodes {count}: start the command on each node with its --node-rank, 0 to "
            f"{count - 1}, and with --rendezvous HOST:PORT, where HOST is node 0"
        )
    rank = _whole(given, "node_rank", "0")
    rendezvous, restarts = given.pop("rendezvous", ""), _whole(given, "max_restarts", "3")
    if count < 1 or rank >= count:
        raise ConfigError(f"--node-rank {rank} of --nodes {count}: use 0 to {count - 1}")
    return Nodes(count, rank, rendezvous, restarts)


def _whole(given: dict[str, str], key: str, default: str) -> int:
    text = given.pop(key, default)
    if not text.isdecimal():
        raise ConfigError(f"--{key.replace('_', '-')} {text}: expected a whole number")
    return int(text)
