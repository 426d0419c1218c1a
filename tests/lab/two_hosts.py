"""Times on two hosts beside those that the simulator predicts from ping-pongs alone.

    python tests/lab/two_hosts.py        prints the table; as root, on Linux

The hosts are namespaces joined by a slow cable, so that the cable decides and not the cores. The
simulator is given α and β of messages inside and between the hosts, as task 3.7 measures them, and
how long the model computes; nothing else is fitted.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import namespaces
import two_hosts_program as program
from two_hosts_program import BACKWARD, DDP, FORWARD, GLOO, HIERARCHICAL, RING, TREE, Pace, Sample

from distlab.sim import Cluster, Options, simulate
from phase3_multi_node.given import LinkCost, Topology

MEGABITS_PER_S = 100
RANKS_PER_HOST = 2
UNMEASURABLE_S_PER_BYTE = 1e-12  # inside a host; on a busy one, β comes out as 0 now and then
TIMEOUT_S = 240.0  # beside a dozen other processes it takes 70

# Tensors that cross the cable in each direction. Of a ring's 2(N-1) = 6 steps, each takes one chunk
# of n/4 there, or two in bad order. The others send n once, which is the least there is.
CROSSINGS = {
    ("block", RING): 6 * 1 / 4,
    ("block", TREE): 1,
    ("block", HIERARCHICAL): 1,
    ("block", GLOO): 6 * 1 / 4,
    ("block", DDP): 6 * 1 / 4,
    ("cyclic", RING): 6 * 2 / 4,
    ("cyclic", HIERARCHICAL): 1,
}


class Row(NamedTuple):
    """Something that was measured and predicted; times are medians."""

    numbering: str
    name: str
    crossing_bytes: float  # in each direction, as the algorithm says
    link_bytes: float  # as the host has counted, with all headers
    measured_s: float
    predicted_s: float
    waited_s: float  # for a core, on the rank that waited longest

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_s / self.measured_s


class Found(NamedTuple):
    """What a run on two hosts has found."""

    topology: Topology
    agree: dict[str, dict[str, bool]]  # by numbering and name: whether gloo finds the same
    rows: dict[tuple[str, str], Row]  # by numbering and name


def measure(hosts: namespaces.Hosts) -> Found:
    """Run the program on the hosts, and simulate it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        hosts.torchrun(program.__file__, str(path), timeout_s=TIMEOUT_S)
        raw = json.loads(path.read_text(encoding="utf-8"))
    inside, between = (LinkCost(**raw["topology"][key]) for key in ("inside", "between"))
    topology = Topology(tuple(raw["topology"]["hosts"]), inside, between)
    samples = {
        (numbering, name): [Sample(*sample) for sample in each]
        for numbering, by_name in raw["samples"].items()
        for name, each in by_name.items()
    }
    predicted = predict(topology, _pace(samples))
    rows = {key: _row(*key, samples[key], predicted[key]) for key in CROSSINGS}
    return Found(topology, raw["agree"], rows)


def predict(topology: Topology, pace: Pace) -> dict[tuple[str, str], float]:
    """Simulate the program with both numberings; return its seconds, by numbering and name."""
    return {
        (numbering, name): sample.seconds
        for numbering in program.MEASURED
        for name, [sample] in _simulated(topology, numbering, pace).items()
    }


def _simulated(topology: Topology, numbering: str, pace: Pace) -> dict[str, list[Sample]]:
    assert topology.inside
    assert topology.between
    inside_s_per_byte = max(topology.inside.beta_s_per_byte, UNMEASURABLE_S_PER_BYTE)
    cluster = Cluster(
        2,
        RANKS_PER_HOST,
        topology="ethernet",  # one NIC for the ranks of a host, full duplex
        nvlink_bytes_per_s=1 / inside_s_per_byte,
        nic_bytes_per_s=1 / topology.between.beta_s_per_byte,
        latency_s=topology.inside.alpha_s,
        net_latency_s=topology.between.alpha_s,
        numbering=numbering,
    )
    options = Options(algorithm="ring", has_events=False)  # what gloo does
    what = program.MEASURED[numbering], pace, 1
    simulated = simulate(
        program.measure, 2 * RANKS_PER_HOST, *what, cluster=cluster, options=options
    )
    return simulated.results[0]


def _pace(samples: dict[tuple[str, str], list[Sample]]) -> Pace:
    forward_s, backward_s = (
        _median(samples["block", name], _seconds) for name in (FORWARD, BACKWARD)
    )
    return Pace(forward_s / program.LAYERS, backward_s / program.LAYERS)


def _row(numbering: str, name: str, samples: list[Sample], predicted_s: float) -> Row:
    num_bytes = program.GRADIENT_BYTES if name == DDP else program.NUM_BYTES
    return Row(
        numbering,
        name,
        num_bytes * CROSSINGS[numbering, name],
        _median(samples, lambda sample: sample.link_bytes),
        _median(samples, _seconds),
        predicted_s,
        _median(samples, lambda sample: sample.waited_s),
    )


def _seconds(sample: Sample) -> float:
    return sample.seconds


def _median(samples: list[Sample], of: Callable[[Sample], float]) -> float:
    return median(map(of, samples))


def table(found: Found) -> str:
    """Write what was found for people."""
    lines = []
    for name, cost in (("inside", found.topology.inside), ("between", found.topology.between)):
        assert cost
        ms_per_megabyte = cost.beta_s_per_byte * 1e9
        lines.append(
            f"{name:8} α = {cost.alpha_s * 1e6:.0f} µs, β = {ms_per_megabyte:.2f} ms per MB"
        )
    lines += [
        "",
        "ranks   algorithm     over the link: says  counted   measured  predicted  ratio   waited",
    ]
    for row in found.rows.values():
        lines.append(
            f"{row.numbering:7} {row.name:14} {row.crossing_bytes / 1e6:12.2f} MB"
            f" {row.link_bytes / 1e6:6.2f} MB {row.measured_s * 1e3:7.0f} ms"
            f" {row.predicted_s * 1e3:7.0f} ms {row.ratio:6.2f} {row.waited_s * 1e3:5.0f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    with namespaces.two_hosts(MEGABITS_PER_S) as hosts:
        print(table(measure(hosts)))


if __name__ == "__main__":
    main()
