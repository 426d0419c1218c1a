"""Fit the constants of NCCL's protocols to one half of the published tables, and print them.

The search changes one constant at a time, by factors that become smaller. What it makes small is
the mean square error of the logarithm of the seconds, where a table with many points counts a
little more than one with few, small sizes count less, and a gross error counts as its absolute
value. A weak pull to the starting values, most of them from NCCL's own tuner, decides where the
tables say nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log, sqrt

from fidelity import MIB, Table, tables

from distlab.sim.collectives import nccl, protocols

GENERATIONS = {"dgx-a100": "A100", "p4d": "A100", "hgx-b200": "B200"}  # else H100
PULL = 3e-4
GROSS = 0.3
START = {
    "launch_us": {
        "LL": 8.0,
        "LL128": 15.0,
        "Simple": 25.0,
        "NVLS": 45.0,
        "SHARP": 45.0,
        "P2P": 25.0,
    },
    "hop": {"LL": 0.18, "LL128": 0.56, "Simple": 1.0, "NVLS": 1.0, "SHARP": 1.0, "P2P": 1.0},
    "net_hop": {"LL": 0.5, "LL128": 0.8, "Simple": 2.0, "NVLS": 3.0, "SHARP": 3.0, "P2P": 2.0},
    "net_efficiency": {
        "LL": 0.4,
        "LL128": 0.8,
        "Simple": 0.96,
        "NVLS": 0.96,
        "SHARP": 0.96,
        "P2P": 0.96,
    },
    "in_trees": {"LL": 0.8, "LL128": 0.8, "Simple": 0.9},
    "efficiency A100": {"LL": 0.4, "LL128": 0.6, "Simple": 0.84, "P2P": 0.84},
    "efficiency H100": {
        "LL": 0.4,
        "LL128": 0.8,
        "Simple": 0.94,
        "NVLS": 0.78,
        "SHARP": 0.78,
        "P2P": 0.94,
    },
    "efficiency B200": {"NVLS": 0.75, "SHARP": 0.75},  # the others as H100
    "net_latency_us": {"p5": 20.0, "p4d": 20.0},
}
SHARES = ("efficiency", "net_efficiency", "in_trees")
Constants = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Way:
    """What the seconds of one algorithm and protocol are made of; see protocols.py."""

    algorithm: str
    protocol: str
    generation: str
    machine: str
    hop_us: float
    net_hop_us: float
    pattern: nccl.Pattern

    def line(self, constants: Constants) -> tuple[float, float]:
        """Return seconds for no bytes, and for each byte."""
        own = constants[f"efficiency {self.generation}"]
        efficiency = (own if self.protocol in own else constants["efficiency H100"])[self.protocol]
        if self.algorithm == "tree":
            efficiency *= constants["in_trees"][self.protocol]
        net_hop_us = self.net_hop_us
        if self.machine in constants["net_latency_us"]:
            net_hop_us *= constants["net_latency_us"][self.machine]
        start_us = (
            constants["launch_us"][self.protocol]
            + self.hop_us * constants["hop"][self.protocol]
            + net_hop_us * constants["net_hop"][self.protocol]
        )
        net_efficiency = constants["net_efficiency"][self.protocol]
        return start_us * 1e-6, self.pattern.seconds(efficiency, net_efficiency)


def ways(table: Table) -> Iterator[Way]:
    """Yield what the tuner chooses from."""
    cluster, names = table.cluster, [table.algorithm]
    if table.algorithm == "auto":
        names = nccl.algorithms(table.collective, table.members, cluster)
    generation = GENERATIONS.get(table.machine, "H100")
    own = table.machine in START["net_latency_us"]
    for name in names:
        pattern = nccl.pattern(table.collective, name, table.members, cluster)
        for protocol in protocols.OF_ALGORITHM[name]:
            yield Way(
                name,
                protocol,
                generation,
                table.machine,
                pattern.hops * cluster.latency_s * 1e6,
                pattern.net_hops * (1 if own else cluster.net_latency_s * 1e6),
                pattern,
            )


def error(constants: Constants, of: list[tuple[Table, list[Way]]]) -> float:
    """Return the mean error."""
    total = weights = 0.0
    for table, table_ways in of:
        lines = [way.line(constants) for way in table_ways]
        root = sqrt(sum(_weight(num_bytes) for num_bytes, _ in table.points))
        for num_bytes, seconds in table.points:
            predicted_s = min(start_s + num_bytes * byte_s for start_s, byte_s in lines)
            off = abs(log(predicted_s / seconds))
            weight = _weight(num_bytes) / root
            total += weight * min(off * off, GROSS * off)
            weights += weight
    return total / weights


def _weight(num_bytes: int) -> float:
    return 1.0 if num_bytes >= 16 * MIB else 0.7 if num_bytes >= MIB else 0.3


def fit(what: Callable[[Constants], float]) -> Constants:
    """Return the constants for which ``what`` is least, near START."""
    constants = {kind: dict(values) for kind, values in START.items()}
    best, step = inf, 0.5
    while step > 0.004:
        before = best
        for kind, values in constants.items():
            for name, old in list(values.items()):
                for factor in (1 + step, 1 / (1 + step)):
                    is_share = kind.split()[0] in SHARES
                    values[name] = min(old * factor, 1.0) if is_share else old * factor
                    if (found := what(constants)) < best:
                        best, old = found, values[name]
                    values[name] = old
        if best == before:
            step /= 2
    return constants


def pull(constants: Constants) -> float:
    """Return how far the constants are from where they started."""
    pairs = (
        (constants[kind][name], start) for kind in START for name, start in START[kind].items()
    )
    return PULL * sum(log(value / start) ** 2 for value, start in pairs)


def main() -> None:
    """Fit and print."""
    halves: dict[bool, list[tuple[Table, list[Way]]]] = {True: [], False: []}
    for table in tables():
        halves[table.is_fitted].append((table, list(ways(table))))
    constants = fit(lambda values: error(values, halves[True]) + pull(values))
    for kind, values in constants.items():
        print(f"{kind:16}", "  ".join(f"{name} {value:.3g}" for name, value in values.items()))
    for name, is_fitted in (("fitted", True), ("checked", False)):
        print(f"{name:8} {sqrt(error(constants, halves[is_fitted])):.1%}", len(halves[is_fitted]))


if __name__ == "__main__":
    main()
