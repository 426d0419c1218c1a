"""The models and clusters of `distlab plan`, in the form that the planner of Phase 3 takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from distlab import chosen, lessons
from distlab.sim import Cluster
from distlab.util.text import unknown_name

TASKS = ("3.20", "3.21", "3.22")
MATMUL_EFFICIENCY, MATMUL_PADDING = 0.81, 190.0  # fitted by benchmarks/plan_fidelity.py
RING = "Simple"  # NCCL's protocol for long messages


class Shape(NamedTuple):
    """Shape of a model; ``is_gpt`` is False if a GPT is only an approximation of the model."""

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51200
    is_gpt: bool = True


MODELS = {
    "gpt3-13b": Shape(40, 5120, 40),
    "gpt3-175b": Shape(96, 12288, 96),
    "megatron-22b": Shape(48, 6144, 64),
    "megatron-145b": Shape(80, 12288, 96),
    "megatron-530b": Shape(105, 20480, 128),
    "gpt-1t": Shape(128, 25600, 160),
    "llama-2-7b": Shape(32, 4096, 32, 4096, 32000, is_gpt=False),
    "llama-2-13b": Shape(40, 5120, 40, 4096, 32000, is_gpt=False),
    "llama-2-70b": Shape(80, 8192, 64, 4096, 32000, is_gpt=False),
}


def shape_of(model: str) -> Shape:
    """Return the shape of a known model.

    Raises:
        ValueError: The name is unknown; the message lists the valid names and the nearest one.
    """
    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    return MODELS[model]


def numbers_of(cluster: Cluster) -> dict[str, float]:
    """Return the fields of a ``Machine`` that describe a cluster.

    Each GPU gets an equal share of its node's NICs. The bandwidth inside a node is that of an NCCL
    ring.

    Raises:
        ValueError: The cluster has no GPUs whose speed is known.
    """
    gpu = cluster.gpu
    if gpu is None:
        raise ValueError(
            f"{cluster.name} has no GPUs to plan for: choose one that has, say dgx-a100"
        )
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "memory_bytes": gpu.memory_bytes,
        "memory_bytes_per_s": gpu.memory_bytes_per_s,
        "peak_flops": gpu.peak_flops["float16"],
        "node_bytes_per_s": cluster.nvlink_bytes_per_s * gpu.protocol_efficiency.get(RING, 1),
        "node_latency_s": cluster.latency_s,
        "network_bytes_per_s": cluster.nic_bytes_per_s
        * cluster.nics_per_node
        / cluster.gpus_per_node,
        "network_latency_s": cluster.net_latency_s,
        "matmul_efficiency": MATMUL_EFFICIENCY,
        "matmul_padding": MATMUL_PADDING,
    }


class Planner(NamedTuple):
    """The lesson with the planner's functions, and the module with the types that they take."""

    lesson: Any
    given: Any

    def plan(self, shape: Shape, numbers: Mapping[str, float], batch_size: int) -> list[Any]:
        """Return the plans that the lesson's ``plan`` finds, fastest first.

        Raises:
            ValueError: No layout fits into memory.
        """
        plans: list[Any] = self.lesson.plan(
            self.given.Transformer(*shape[:5]), self.given.Machine(**numbers), batch_size
        )
        return plans


def load(impl: str) -> Planner:
    """Return the planner from the solutions, or the learner's own.

    Args:
        impl: "solution" or "mine".

    Raises:
        NotThereError: This copy has no solutions, or a task of the lesson is still a TODO.
    """
    lesson = chosen.lesson(chosen.find(impl, TASKS), "auto_sharding")
    return Planner(lesson, lessons.given_3)


def model_flops(shape: Shape, batch_size: int) -> float:
    """Return the FLOPs of a step without recomputation: 72 B s l h² plus smaller terms.

    Source: Narayanan et al. 2021, equation 3; Korthikanti et al. 2022, equation 8.
    """
    layers, h, _, s, vocabulary, _ = shape
    return 72 * batch_size * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
