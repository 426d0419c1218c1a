"""Two hosts on one machine: network namespaces, joined by a cable whose rate is limited.

    host 0: node0, 10.0.0.1 ── eth0 ══ rate in each direction ══ eth0 ── host 1: node1, 10.0.0.2

Whatever is started here ends with the process that started it, and the namespaces are removed when
the ``with`` block ends.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

NAME = "distlab-{pid}-{host}"
ADDRESS = "10.0.0.{}"
PORT = 29500  # in the namespace of host 0, where nobody else listens
TOOLS = ("ip", "tc", "unshare", "setpriv", "hostname", "sysctl")
RUNS = Path("/run/netns")

# A queue in front of the cable that is never full, so that nothing is lost; but of each connection
# only little waits there, or gloo's notice that a receive is ready would wait behind whole tensors.
# A fair queue would see to that; not all kernels have one.
QUEUE = ("burst", "6kb", "limit", "8mb")
SETTINGS = {
    "net.ipv4.tcp_limit_output_bytes": "4096",
    "net.ipv4.tcp_slow_start_after_idle": "0",  # a connection rests while others are measured
    "net.ipv4.tcp_congestion_control": "reno",  # which all kernels have
}
PACKETS = ("gso_max_size", "4096")


class Unavailable(Exception):
    """This machine cannot have such hosts, or this user may not make them; says why."""


class Failed(Exception):
    """A command has failed on a host, or took too long; with what all hosts printed."""


class Hosts(NamedTuple):
    """The names of the namespaces; host i calls itself nodei."""

    namespaces: tuple[str, str]

    def run(self, commands: Sequence[Sequence[str]], *, timeout_s: float) -> str:
        """Run a command on each host, at the same time, and return what they printed.

        Raises:
            Failed: one of them ended with another code than 0, or none in time. All that was
                started on both hosts has ended then.
        """
        with tempfile.TemporaryFile("w+") as output:
            running = [
                subprocess.Popen(_on(name, host, commands[host]), stdout=output, stderr=output)
                for host, name in enumerate(self.namespaces)
            ]
            try:
                problem = _wait(running, timeout_s)
            finally:
                for process in running:
                    process.kill()  # unshare, and with it all processes of the host
                    process.wait()
            output.seek(0)
            if problem:
                raise Failed(f"{problem}\n{output.read()}")
            return output.read()

    def torchrun(self, *script: str, ranks_per_host: int = 2, timeout_s: float) -> str:
        """Run a script as ``torchrun --nnodes 2`` does; see ``run``."""
        command = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "2"]
        command += ["--nproc-per-node", str(ranks_per_host), "--master-port", str(PORT)]
        command += ["--master-addr", ADDRESS.format(1)]
        each = [[*command, "--node-rank", str(host), *script] for host in range(2)]
        return self.run(each, timeout_s=timeout_s)


def _on(namespace: str, host: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one on a host, and ends it when this process ends."""
    own = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    named = ("sh", "-c", 'hostname "$0" && exec "$@"', f"node{host}")
    variables = ("env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1")
    enter = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace)
    return [*enter, *own, *named, *variables, *command]


def _wait(running: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> str:
    """Wait until all have ended, or one has failed; return what went wrong."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in running]
        for host, code in enumerate(codes):
            if code:
                return f"the command on node{host} ended with code {code}"
        if None not in codes:
            return ""
        time.sleep(0.05)
    return f"the commands on node0 and node1 took more than {timeout_s:g} s"


@contextmanager
def two_hosts(megabits_per_s: float) -> Iterator[Hosts]:
    """Make two hosts, and remove them in the end.

    Args:
        megabits_per_s: of the cable, in each direction.

    Raises:
        Unavailable: this machine or this user cannot.
    """
    _check()
    _remove_forgotten()
    namespaces = tuple(NAME.format(pid=os.getpid(), host=host) for host in range(2))
    try:
        _make(namespaces, megabits_per_s)
        yield Hosts((namespaces[0], namespaces[1]))
    finally:
        for name in namespaces:
            _remove(name)


def _check() -> None:
    if sys.platform != "linux":
        raise Unavailable(f"network namespaces need Linux, this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("only root may make network namespaces")
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise Unavailable(
            f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, hostname, procps)"
        )


def _make(namespaces: Sequence[str], megabits_per_s: float) -> None:
    for name in namespaces:
        _run("ip", "netns", "add", name)
    one, other = namespaces
    cable = ("ip", "link", "add", "eth0", "netns", one, "type", "veth")
    _run(*cable, "peer", "name", "eth0", "netns", other)
    rate = f"{megabits_per_s:g}mbit"
    for host, name in enumerate(namespaces):
        _run("ip", "-n", name, "address", "add", f"{ADDRESS.format(host + 1)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up", *PACKETS)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", *settings)
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, *QUEUE)
        _run(*_on(name, host, ["true"]))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _remove(namespace: str) -> None:
    if (RUNS / namespace).exists():
        with suppress(Unavailable):  # another test run has removed it just now
            _run("ip", "netns", "delete", namespace)


def _remove_forgotten() -> None:
    """Remove the namespaces of test runs that were killed before they could."""
    for path in RUNS.glob(NAME.format(pid="*", host="*")):
        pid = int(re.findall(r"\d+", path.name)[0])
        if not psutil.pid_exists(pid):
            _remove(path.name)
