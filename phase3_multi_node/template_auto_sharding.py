"""Automatic sharding: how much memory and time a layout needs, and which layout is the fastest.

Tasks 3.21 to 3.23. The docstring says what a function promises, its TODO what you need for it, and
guidelines.md why and how. To grade one task: ``distlab check 3.21``. When all are done, ``distlab
plan --impl mine`` plans with them.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd

from phase3_multi_node.given import (
    CHECKPOINTING,
    Checkpointing,
    Layout,
    Machine,
    Memory,
    Plan,
    StepTime,
    Transformer,
    divisors,
    matmul_seconds,
    ring_seconds,
    send_seconds,
)


def parameters_per_rank(model: Transformer, layout: Layout) -> float:
    """Return how many parameters a rank of the first stage computes with.

    The first stage has l/p layers and the embeddings of tokens and positions; the ranks of the
    tensor group share all of it evenly:
        (l/p · (12h² + 13h) + (V + s) · h) / t
        GPT-3, l = 96, h = 12288, V = 51200, s = 2048, t = p = 8  ->  2.80 billion

    (In truth, norms and some biases are on every rank of the group: a ten-thousandth of a layer.)

    Args:
        model, layout: pipeline divides the layers.

    Returns:
        A number, rounded to a whole one or not. Sharding by ZeRO changes who stores the parameters,
        not who computes with them, so it does not count here.

    Source: Narayanan et al. 2021, section 5.1, equation 2.
    """
    # TODO 3.21: the first stage's layers and embeddings, divided by t.
    #   Tools: arithmetic alone.
    #   Example: l = 4, h = 64, V = s = 128, t = p = 2: (2 · 49,984 + 16,384) / 2 = 58,176.
    #   About 4 lines.
    raise NotImplementedError(
        "Task 3.21: parameters_per_rank, see guidelines.md#321-estimate-the-memory"
    )


def activation_bytes_per_layer(
    model: Transformer, layout: Layout, checkpointing: Checkpointing
) -> float:
    """Return the bytes that a rank keeps of one layer, for the backward pass of one micro-batch.

    Values take 2 bytes, masks of dropout 1; u is t with sequence parallelism, else 1:
        none         sbh · (10/u + 24/t) + 5as²b/t
        selective    sbh · (10/u + 24/t)              scores, softmax and their dropout are left out
        full         2sbh / u                         only the input is kept
        GPT-3, b = 1, t = 8, with sequence parallelism  ->  359 MB, 107 MB and 6.29 MB

    Args:
        model: the transformer.
        layout: tensor, micro_batch and sequence_parallel count here.
        checkpointing: the kind of recomputation, instead of the layout's.

    Returns:
        The bytes.

    Source: Korthikanti et al. 2022, section 4, table 2.
    """
    # TODO 3.21: the row of the table that ``checkpointing`` names.
    #   Tools: arithmetic alone.
    #   Example: s = 128, b = 1, h = 64, a = 4, t = 1: 606,208 bytes, 278,528 and 16,384.
    #   About 6 lines.
    raise NotImplementedError(
        "Task 3.21: activation_bytes_per_layer, see guidelines.md#321-estimate-the-memory"
    )


def layers_in_flight(model: Transformer, layout: Layout, batch_size: int) -> float:
    """Return of how many layers the first stage keeps activations at once.

    A stage has v chunks of l/(pv) layers. Until the first micro-batch comes back, the first stage
    has done this many forward passes through one of its chunks, each of which keeps activations:
        1F1B (v = 1)     p                but no more than there are:  m
        interleaved      vp + p - 1                                    vm
        l = 96, p = 8, m = 64  ->  96 layers with v = 1 and 124 with v = 3

    Args:
        model, layout: the chunks of all stages divide the layers evenly.
        batch_size: sequences in a step, of all copies together; m follows from it.

    Returns:
        The layers, counted once for each micro-batch.

    Source: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.
    """
    # TODO 3.21: the forward passes that are ahead, times the layers of a chunk.
    #   Tools: Layout.micro_batches, min.
    #   Example: 8 layers, p = 4, v = 1: 8 layers with 4 micro-batches or more, 4 with 2.
    #   About 3 lines.
    raise NotImplementedError(
        "Task 3.21: layers_in_flight, see guidelines.md#321-estimate-the-memory"
    )


def estimate_memory(model: Transformer, layout: Layout, batch_size: int) -> Memory:
    """Return what a rank of the first stage holds at once, part by part.

    Mixed precision with Adam: values and gradients in 2 bytes, and 12 bytes of optimizer state for
    each parameter (a copy in float32 and two moments). With Ψ parameters on the rank:
        parameters     2Ψ    / d with ZeRO 3
        gradients      2Ψ    / d with ZeRO 2 and 3
        optimizer     12Ψ    / d with ZeRO 1, 2 and 3
        activations   of a layer, as it is checkpointed, times the layers in flight
        recomputed    what one whole layer holds more than it keeps
        logits        4bsV/t if p = 1, else 0 (the last stage has them)
        7.5 billion parameters, d = 64  ->  120, 31.4, 16.6 and 1.88 GB of states by ZeRO stage

    Args:
        model, layout: as for the functions above; d · b divides the batch. Nothing is checked.
        batch_size: sequences in a step, of all copies together.

    Returns:
        The parts, in bytes, rounded to whole ones or not; their sum is ``total``. Workspace of
        libraries, fragmentation and buffers of messages come on top.

    Source: Rajbhandari et al. 2020, section 5; Korthikanti et al. 2022, section 4.
    """
    # TODO 3.21: the six parts.
    #   Tools: the three functions above, Memory.
    #   Example: Ψ = 1 billion, d = 4, ZeRO 1: 2 GB of parameters, 2 of gradients and 3 of optimizer
    #   state.
    #   About 12 lines.
    raise NotImplementedError(
        "Task 3.21: estimate_memory, see guidelines.md#321-estimate-the-memory"
    )


def attention_seconds(model: Transformer, layout: Layout, machine: Machine) -> float:
    """Return the seconds of attention without its linear layers: forward, for one micro-batch.

    A rank computes ba/t heads. For each head:
        scores     a product of (s, h/a) and (h/a, s)
        context    a product of (s, s) and (s, h/a)
        between    softmax and dropout read and write 9s² bytes of its memory
        GPT-3, b = 1, t = 8, 312 TFLOP/s and 2 TB/s, without losses  ->  0.31 ms

    Args:
        model: the transformer; its heads divide the width.
        layout: tensor and micro_batch count here; tensor divides the heads.
        machine: its GPU takes ``matmul_seconds`` for products, and 1 / memory_bytes_per_s a byte.

    Returns:
        The seconds, one thing after the other.
    """
    # TODO 3.22: two products and the memory traffic of all heads of the rank.
    #   Tools: matmul_seconds, whose ``count`` is that of equal products.
    #   Example: s = h = 1024, a = 16, b = t = 1, 100 TFLOP/s, 1 TB/s, no padding: 21 + 21 + 151
    #   = 194 µs.
    #   About 5 lines.
    raise NotImplementedError(
        "Task 3.22: attention_seconds, see guidelines.md#322-estimate-the-time-of-a-step"
    )


def forward_seconds(model: Transformer, layout: Layout, machine: Machine) -> float:
    """Return the seconds that a rank computes for one layer: forward, for one micro-batch.

    Attention takes ``attention_seconds``. Beside it there are, with u as for activations:
        products    of (bs, h) and (h, 3h/t): queries, keys and values
                    of (bs, h/t) and (h/t, h): the output of attention
                    of (bs, h) and (h, 4h/t), and of (bs, 4h/t) and (4h/t, h): the MLP
        memory      bsh · (22/u + 16/t) bytes: norms, dropout and sums; GELU
        GPT-3, b = 1, t = 8, 312 TFLOP/s and 2 TB/s, without losses  ->  3.58 ms, and 3.34 ms with
        sequence parallelism

    Args:
        model: the transformer; its heads divide the width.
        layout: tensor, micro_batch and sequence_parallel count here; tensor divides the heads.
        machine: the machine, as for ``attention_seconds``.

    Returns:
        The seconds, one thing after the other, without messages.
    """
    # TODO 3.22: four products, memory traffic, and attention.
    #   Tools: matmul_seconds, attention_seconds.
    #   Example: as above, 258 µs of products, 40 of memory traffic and 194 of attention: 491 µs.
    #   About 7 lines.
    raise NotImplementedError(
        "Task 3.22: forward_seconds, see guidelines.md#322-estimate-the-time-of-a-step"
    )


def estimate_step_time(
    model: Transformer, layout: Layout, batch_size: int, machine: Machine
) -> StepTime:
    """Return how long a step takes, part by part.

    A stage has k = l/p layers, and m micro-batches pass through it. F is ``forward_seconds``, A is
    ``attention_seconds``, and backward passes take twice as long as forward passes:
        a layer      C = 3F, + A if checkpointing is selective, + F if it is full
                     M = 4 all-reduces of 2bsh bytes between t ranks, or 6 if checkpointing is full
        compute      m · (k · C + 3 products of (bs, h) and (h, V/t), the logits)
        tensor       m · k · M
        pipeline     2vm messages of 2bsh/t bytes between stages; 0 if p = 1
        bubble       (p - 1) / v · k · (C + M)
        data         rings of 2Ψ bytes between the d copies, as far as they take longer than 2kF,
                     the backward pass of the last micro-batch, which hides them:
                     2 rings with ZeRO 0 and 1, m + 1 with ZeRO 2, 3m with ZeRO 3

    A ring is one reduce-scatter or all-gather, which takes ``ring_seconds``; an all-reduce is two.
    (Sequence parallelism has two rings in place of each all-reduce, which takes as long.) A tensor
    group spans t neighbouring GPUs, the d copies span dt, and a pipeline spans dtp.

    Args:
        model, layout: as for ``estimate_memory``.
        batch_size: sequences in a step, of all copies together.
        machine: machine that the model runs on.

    Returns:
        The parts, in seconds; their sum is ``total``. The optimizer, which takes some hundredths
        of a second, is left out.

    Source: Narayanan et al. 2021, sections 2 and 3.
    """
    # TODO 3.22: the five parts.
    #   Tools: forward_seconds, attention_seconds, parameters_per_rank, matmul_seconds,
    #   ring_seconds, send_seconds, StepTime; helpers of your own keep it short.
    #   Example: F = 1 ms, M = 0, k = 6, p = 4, v = 2: the bubble takes 3 / 2 · 6 · 3 = 27 ms.
    #   About 35 lines.
    raise NotImplementedError(
        "Task 3.22: estimate_step_time, see guidelines.md#322-estimate-the-time-of-a-step"
    )


def layouts(model: Transformer, machine: Machine, batch_size: int) -> Iterator[Layout]:
    """Yield every valid layout once, in any order.

    A layout is valid if
        d · t · p is the number of GPUs,
        t divides the GPUs of a node and the heads,
        p · v divides the layers, and v = 1 unless p > 1 and m is a multiple of p,
        d · b divides the batch,
        ZeRO is 0 if d = 1; else 0 or 1 with a pipeline, and 0 to 3 without,
        checkpointing is any of ``CHECKPOINTING``,
        there is sequence parallelism only if t > 1 and t divides the length.

        2 layers, 2 heads, 2 GPUs in a node, a batch of 2 sequences, even length  ->  30 layouts

    Args:
        model: the transformer.
        machine: its numbers of nodes and of GPUs in each count here.
        batch_size: sequences in a step, of all copies together.

    Returns:
        What is iterated over: a generator or a list.

    Cost: some thousands of layouts for a thousand GPUs, so do not try what cannot be valid.
    """
    # TODO 3.23: every valid layout once.
    #   Tools: divisors, math.gcd, itertools.product, yield.
    #   Example: 1 GPU, 1 layer, 1 sequence: 3 layouts, which differ in checkpointing.
    #   About 14 lines.
    raise NotImplementedError(
        "Task 3.23: layouts, see guidelines.md#323-plan-the-fastest-layout-that-fits"
    )


def plan(model: Transformer, machine: Machine, batch_size: int) -> list[Plan]:
    """Return all layouts that fit into the memory of the machine, the fastest first.

    What decides is ``total`` of the estimates; equally fast ones come in any order:
        GPT-3 on 8 nodes of 8 A100, 64 sequences  ->  376 layouts fit, the best with t = 4, p = 8

    Args:
        model: the transformer.
        machine: machine that the model runs on; a layout fits if it needs ``memory_bytes`` at most.
        batch_size: sequences in a step, of all copies together.

    Returns:
        Each layout with both estimates, ``estimate_memory`` and ``estimate_step_time``.

    Raises:
        ValueError: no layout is valid; names the number of GPUs and the batch size. None fits:
            names the smallest need, in GB of 10⁹ bytes, rounded to one decimal, such as 91.2.

    Cost: one estimate of memory for each layout, and one of time for each that fits.
    """
    # TODO 3.23: the layouts that fit, sorted.
    #   Tools: layouts, estimate_memory, estimate_step_time, Plan, sorted.
    #   Example: layouts of 2.0 s and 60 GB, 1.8 s and 70 GB, and 1.5 s and 90 GB on GPUs of 80 GB:
    #   the second, then the first.
    #   About 18 lines.
    raise NotImplementedError(
        "Task 3.23: plan, see guidelines.md#323-plan-the-fastest-layout-that-fits"
    )
