"""All hardware numbers of the simulator, each with its source. Data only.

    status      meaning
    spec        from the manufacturer's data sheet: one direction, dense (the sheets print the sum
                of both directions, and twice the FLOP/s with sparsity)
    measured    a published measurement
    fitted      fitted to published runs of NCCL; docs/fidelity.md shows how well
    assumed     not published, but plausible; `Cluster.assumptions` lists these

Simulated times use achievable FLOP/s, and utilisation (MFU) uses the peak, so both are listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

Status = Literal["spec", "measured", "fitted", "assumed"]


class Number(NamedTuple):
    value: float
    status: Status
    source: str


def spec(value: float, source: str) -> Number:
    return Number(value, "spec", source)


def measured(value: float, source: str) -> Number:
    return Number(value, "measured", source)


def fitted(value: float) -> Number:
    return Number(value, "fitted", "half of the tables in docs/fidelity.md")


def assumed(value: float, source: str) -> Number:
    return Number(value, "assumed", source)


GIB = 2**30  # the data sheets say GB, but the drivers report GiB
Gbps = 1e9 / 8  # bytes/s

# ------------------------------------------------------------------------------ NCCL's protocols


class Protocol(NamedTuple):
    """Cost of a collective in addition to its bytes; see collectives/protocols.py.

    Attributes:
        launch_s: Seconds per collective, including the kernel's start.
        hop: Latency between two GPUs of a node, as a multiple of the cluster's ``latency_s``.
        net_hop: Latency between two nodes, as a multiple of the cluster's ``net_latency_s``.
        net_efficiency: Bytes of data per byte sent between nodes; see GPUS for bytes inside nodes.
        in_trees: Factor on the efficiency inside a node if the algorithm is a tree, in which a GPU
            serves three neighbours instead of two.
    """

    launch_s: Number
    hop: Number
    net_hop: Number
    net_efficiency: Number
    in_trees: Number = Number(1.0, "spec", "no trees")


PROTOCOLS = {
    "LL": Protocol(fitted(9.55e-6), fitted(0.193), fitted(1.09), fitted(0.113), fitted(0.8)),
    "LL128": Protocol(fitted(12.2e-6), fitted(0.477), fitted(2.8), fitted(0.414), fitted(0.956)),
    "Simple": Protocol(fitted(22.3e-6), fitted(1.39), fitted(2.91), fitted(0.985), fitted(0.275)),
    "NVLS": Protocol(fitted(63.4e-6), fitted(1.04), fitted(5.12), fitted(0.918)),
    "SHARP": Protocol(fitted(45.4e-6), fitted(1), fitted(3.02), fitted(0.699)),
    "P2P": Protocol(fitted(52.7e-6), fitted(1.12), fitted(2.03), fitted(0.893)),
}

# Bytes of data per byte that NVLink carries, by protocol.
_AMPERE = {
    "LL": fitted(0.418),
    "LL128": fitted(0.55),
    "Simple": fitted(0.833),
    "P2P": fitted(0.752),
}
_HOPPER = {
    "LL": fitted(0.443),
    "LL128": fitted(0.806),
    "Simple": fitted(0.905),
    "NVLS": fitted(0.768),
    "SHARP": fitted(0.576),
    "P2P": fitted(0.94),
}
_BLACKWELL = {
    "NVLS": fitted(0.727),
    "SHARP": fitted(0.75),
    "LL": assumed(0.443, "as Hopper"),
    "LL128": assumed(0.806, "as Hopper"),
    "Simple": assumed(0.905, "as Hopper"),
    "P2P": assumed(0.94, "as Hopper"),
}

# ---------------------------------------------------------------------------------------- GPUs

_MATMUL = "best matmul found by mamf-finder, bfloat16; ml-engineering, compute/accelerator"


def _gpu(
    sheet: str,
    *,
    memory_gib: float,
    memory_tb_per_s: float,
    peak_tflops: Mapping[str, float],
    matmul: Number,
    protocol_efficiency: Mapping[str, Number],
) -> dict[str, Number]:
    """Return the numbers of one GPU, named after the fields of `cluster.GPU`.

    Args:
        matmul: FLOP/s that the 16-bit dtypes reach. Other dtypes are assumed to reach the same
            fraction of their peaks.
    """
    numbers = {
        "memory_bytes": spec(memory_gib * GIB, sheet),
        "memory_bytes_per_s": spec(memory_tb_per_s * 1e12, sheet),
    }
    peaks = {dtype: spec(tflops * 1e12, sheet) for dtype, tflops in peak_tflops.items()}
    share = matmul.value / peaks["float16"].value
    for dtype, peak in peaks.items():
        numbers[f"peak_flops.{dtype}"] = peak
        sixteen_bit = peak.value == peaks["float16"].value
        guess = assumed(peak.value * share, f"{share:.1%} of the peak, as in 16 bits")
        numbers[f"achievable_flops.{dtype}"] = matmul if sixteen_bit else guess
    shares = {f"protocol_efficiency.{name}": n for name, n in protocol_efficiency.items()}
    return numbers | shares


# float32 is listed without TF32 and float64 with tensor cores, as torch.matmul runs by default.
GPUS: dict[str, dict[str, Number]] = {
    "A100-40GB": _gpu(
        "NVIDIA A100 SXM4 40 GB data sheet",
        memory_gib=40,
        memory_tb_per_s=1.555,
        peak_tflops={"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5},
        matmul=assumed(271e12, "as A100-80GB: the same chip with other memory"),
        protocol_efficiency=_AMPERE,
    ),
    "A100-80GB": _gpu(
        "NVIDIA A100 SXM4 80 GB data sheet",
        memory_gib=80,
        memory_tb_per_s=2.039,
        peak_tflops={"float16": 312, "bfloat16": 312, "float32": 19.5, "float64": 19.5},
        matmul=measured(271e12, _MATMUL),
        protocol_efficiency=_AMPERE,
    ),
    "H100-80GB": _gpu(
        "NVIDIA H100 SXM5 data sheet",
        memory_gib=80,
        memory_tb_per_s=3.35,
        peak_tflops={"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67},
        matmul=measured(794e12, _MATMUL),
        protocol_efficiency=_HOPPER,
    ),
    "H200-141GB": _gpu(
        "NVIDIA H200 SXM5 data sheet",
        memory_gib=141,
        memory_tb_per_s=4.8,
        peak_tflops={"float16": 989, "bfloat16": 989, "float32": 67, "float64": 67},
        matmul=assumed(794e12, "as H100-80GB: the same chip with other memory"),
        protocol_efficiency=_HOPPER,
    ),
    "B200-180GB": _gpu(
        "NVIDIA GB200 NVL72 data sheet, column HGX B200; its memory: DGX B200, 64 TB/s / 8",
        memory_gib=180,
        memory_tb_per_s=8.0,
        peak_tflops={"float16": 2250, "bfloat16": 2250, "float32": 75, "float64": 37},
        matmul=measured(1745e12, _MATMUL),
        protocol_efficiency=_BLACKWELL,
    ),
    "GB200-186GB": _gpu(
        "NVIDIA GB200 NVL72 data sheet",
        memory_gib=186,
        memory_tb_per_s=8.0,
        peak_tflops={"float16": 2500, "bfloat16": 2500, "float32": 80, "float64": 40},
        matmul=measured(1822e12, _MATMUL),
        protocol_efficiency=_BLACKWELL,
    ),
}

# ------------------------------------------------------------------------------------ clusters

_ALL_REDUCE_BENCH = "all_reduce and p2p runs in ml-engineering, network/"
_IF_RING = f"divided by its steps, if it ran as a ring; {_ALL_REDUCE_BENCH}"
_NCCL_TABLE = "middle of NCCL's own table, 5 to 14 µs per network hop (src/graph/tuning.cc)"
_BOARD = partial(spec, source="eight GPUs and eight NICs on one board")
_relayed = partial(assumed, source="one more NVLink message through the relaying GPU")
_NO_RELAY = spec(0.0, "no GPU or switch relays on any route")
_ETHERNET = "line rate x 0.94, the share of TCP payload in a full Ethernet frame (1448 / 1538)"


@dataclass(frozen=True)
class Preset:
    """One kind of cluster; the fields are the arguments of `cluster.Cluster`."""

    topology: str
    gpu: str | None  # key of GPUS; None if computation takes no time
    gpus_per_node: Number
    nics_per_node: Number
    nvlink_bytes_per_s: Number  # bandwidth of one GPU inside its node
    nic_bytes_per_s: Number  # bandwidth of one NIC
    latency_s: Number
    net_latency_s: Number
    hop_latency_s: Number
    switch_adds: bool = False  # NVLink SHARP, in the NVSwitch of Hopper and later


def _ethernet(gigabit: float, net_latency_s: float) -> Preset:
    return Preset(
        "ethernet",
        gpu=None,
        gpus_per_node=assumed(1, "one PCIe GPU in each machine"),
        nics_per_node=spec(1, "one network socket"),
        nvlink_bytes_per_s=spec(31e9, "PCIe 4.0 x16"),
        nic_bytes_per_s=spec(gigabit * 0.94 * Gbps, f"{gigabit} GbE: {_ETHERNET}"),
        latency_s=assumed(10e-6, "a copy over PCIe through the host"),
        net_latency_s=assumed(net_latency_s, "a TCP message, guessed between 30 and 50 µs"),
        hop_latency_s=_NO_RELAY,
    )


_DGX_H100 = Preset(
    "rail-optimised",
    gpu="H100-80GB",
    gpus_per_node=_BOARD(8),
    nics_per_node=_BOARD(8),
    nvlink_bytes_per_s=measured(376e9, f"p2p, sheet 450e9; {_ALL_REDUCE_BENCH}"),
    nic_bytes_per_s=spec(400 * Gbps, "DGX H100 data sheet: 8 x ConnectX-7 NDR"),
    latency_s=assumed(41e-6 / 14, "as dgx-h200: the same NVLink"),
    net_latency_s=assumed(10e-6, _NCCL_TABLE),
    hop_latency_s=_relayed(3e-6),
    switch_adds=True,
)
_RENTED_H100 = replace(
    _DGX_H100,
    nvlink_bytes_per_s=assumed(376e9, "as dgx-h100: the same board"),
    latency_s=assumed(41e-6 / 14, "as dgx-h100: the same board"),
)

CLUSTERS: dict[str, Preset] = {
    "laptop": Preset(
        "ethernet",
        gpu=None,
        gpus_per_node=assumed(8, "eight processes on one machine"),
        nics_per_node=spec(1, "one network socket"),
        nvlink_bytes_per_s=measured(19.3 * Gbps, "gloo, 40 MB over localhost (torchft#199)"),
        nic_bytes_per_s=spec(0.94 * Gbps, f"1 GbE: {_ETHERNET}"),
        latency_s=assumed(50e-6, "a TCP message over localhost between two Python processes"),
        net_latency_s=assumed(100e-6, "a TCP message through a home switch"),
        hop_latency_s=_NO_RELAY,
    ),
    "dgx-a100": replace(
        _DGX_H100,
        gpu="A100-80GB",
        nvlink_bytes_per_s=measured(274e9, f"p2p, sheet 300e9; {_ALL_REDUCE_BENCH}"),
        nic_bytes_per_s=spec(200 * Gbps, "DGX A100 data sheet: 8 x ConnectX-6 HDR"),
        latency_s=assumed(79e-6 / 14, f"shortest all_reduce 79 µs; {_IF_RING}"),
        hop_latency_s=_relayed(5e-6),
        switch_adds=False,
    ),
    "dgx-h100": _DGX_H100,
    "dgx-h200": replace(
        _DGX_H100,
        gpu="H200-141GB",
        nvlink_bytes_per_s=measured(396e9, f"p2p, sheet 450e9; {_ALL_REDUCE_BENCH}"),
        nic_bytes_per_s=spec(400 * Gbps, "DGX H200 data sheet: 8 x ConnectX-7 NDR"),
        latency_s=assumed(41e-6 / 14, f"shortest all_reduce 41 µs; {_IF_RING}"),
    ),
    "hgx-b200": replace(
        _DGX_H100,
        gpu="B200-180GB",
        nvlink_bytes_per_s=assumed(
            746e9, "as gb200-nvl72: ring busbw of both is 680e9; sheet 900e9"
        ),
        nic_bytes_per_s=spec(400 * Gbps, "DGX B200 data sheet: 8 x ConnectX-7 NDR"),
        latency_s=assumed(4e-6, "between dgx-h200 and dgx-a100"),
        hop_latency_s=_relayed(4e-6),
    ),
    "gb200-nvl72": replace(  # one rack is a node, with 72 GPUs on one NVLink switch
        _DGX_H100,
        gpu="GB200-186GB",
        gpus_per_node=spec(72, "18 trays x 4 GPUs on one NVLink switch"),
        nics_per_node=spec(72, "DGX GB200 user guide: 4 x ConnectX-7 per tray of 4 GPUs"),
        nvlink_bytes_per_s=measured(746e9, f"p2p, sheet 900e9; {_ALL_REDUCE_BENCH}"),
        nic_bytes_per_s=spec(400 * Gbps, "DGX GB200: ConnectX-7 (AWS P6e has 800)"),
        latency_s=assumed(3e-6, "near dgx-h200"),
    ),
    "p4d": Preset(
        "switch",
        gpu="A100-40GB",
        gpus_per_node=spec(8, "AWS P4d"),
        nics_per_node=spec(4, "AWS P4d: 4 x 100 Gb/s EFA, each shared by two GPUs"),
        nvlink_bytes_per_s=assumed(274e9, "as dgx-a100: the same board"),
        nic_bytes_per_s=spec(100 * Gbps, "AWS P4d: 4 x 100 Gb/s EFA"),
        latency_s=assumed(79e-6 / 14, "as dgx-a100: the same board"),
        net_latency_s=fitted(83.6e-6),
        hop_latency_s=_NO_RELAY,
    ),
    "p5": replace(
        _RENTED_H100,
        nics_per_node=assumed(8, "AWS P5: 32 x 100 Gb/s EFA, four for each GPU, taken as one"),
        nic_bytes_per_s=spec(400 * Gbps, "AWS P5: 4 x 100 Gb/s EFA for each GPU"),
        net_latency_s=fitted(30.7e-6),
    ),
    "a3-mega": replace(
        _RENTED_H100,
        gpus_per_node=spec(8, "Google A3 Mega"),
        nics_per_node=spec(8, "Google A3 Mega: without the front-end NIC in its 1,800 Gb/s"),
        nic_bytes_per_s=spec(200 * Gbps, "Google A3 Mega, GPUDirect-TCPXO: 8 x 200 Gb/s"),
        net_latency_s=assumed(80e-6, "TCPXO: two nodes need 124 µs to add up a few bytes"),
    ),
    "ethernet-10g": _ethernet(10, net_latency_s=50e-6),
    "ethernet-25g": _ethernet(25, net_latency_s=30e-6),
}

PRESETS = tuple(CLUSTERS)
