"""Automatic sharding: how much memory and time a layout needs, and which layout is the fastest.

Nothing runs here: the functions compute what a training step would need, in a fraction of a second
for a thousand GPUs.
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
    h = model.width
    of_layers = model.layers / layout.pipeline * (12 * h**2 + 13 * h)
    of_embeddings = (model.vocabulary + model.length) * h
    return (of_layers + of_embeddings) / layout.tensor


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
    b, s, h, t = layout.micro_batch, model.length, model.width, layout.tensor
    u = t if layout.sequence_parallel else 1
    if checkpointing == "full":
        return 2 * s * b * h / u
    scores = 5 * model.heads * s**2 * b / t if checkpointing == "none" else 0
    return s * b * h * (10 / u + 24 / t) + scores


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
    p, v = layout.pipeline, layout.chunks
    passes = p if v == 1 else v * p + p - 1
    return min(passes, v * layout.micro_batches(batch_size)) * model.layers / (p * v)


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
    parameters, d = parameters_per_rank(model, layout), layout.data
    stage, tokens = layout.zero_stage, layout.micro_batch * model.length
    kept = activation_bytes_per_layer(model, layout, layout.checkpointing)
    return Memory(
        parameters=2 * parameters / (d if stage >= 3 else 1),
        gradients=2 * parameters / (d if stage >= 2 else 1),
        optimizer=12 * parameters / (d if stage >= 1 else 1),
        activations=kept * layers_in_flight(model, layout, batch_size),
        recomputed=activation_bytes_per_layer(model, layout, "none") - kept,
        logits=4 * tokens * model.vocabulary / layout.tensor if layout.pipeline == 1 else 0,
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
    s, of_head = model.length, model.width / model.heads
    heads = layout.micro_batch * model.heads / layout.tensor
    scores = matmul_seconds(machine, s, of_head, s, heads)
    context = matmul_seconds(machine, s, s, of_head, heads)
    return scores + context + 9 * s**2 * heads / machine.memory_bytes_per_s


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
    tokens, h, t = layout.micro_batch * model.length, model.width, layout.tensor
    u = t if layout.sequence_parallel else 1
    weights = ((h, 3 * h / t), (h / t, h), (h, 4 * h / t), (4 * h / t, h))
    linear = sum(matmul_seconds(machine, tokens, rows, columns) for rows, columns in weights)
    moved = tokens * h * (22 / u + 16 / t)
    return linear + moved / machine.memory_bytes_per_s + attention_seconds(model, layout, machine)


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
    m, k = layout.micro_batches(batch_size), model.layers / layout.pipeline
    forward = forward_seconds(model, layout, machine)
    again = {"none": 0, "full": forward}.get(
        layout.checkpointing, attention_seconds(model, layout, machine)
    )
    layer, messages = 3 * forward + again, _tensor_seconds(model, layout, machine)
    return StepTime(
        compute=m * (k * layer + _logit_seconds(model, layout, machine)),
        tensor=m * k * messages,
        pipeline=_pipeline_seconds(model, layout, m, machine),
        bubble=(layout.pipeline - 1) / layout.chunks * k * (layer + messages),
        data=max(0, _data_seconds(model, layout, m, machine) - 2 * k * forward),
    )


def _tensor_seconds(model: Transformer, layout: Layout, machine: Machine) -> float:
    rings = 2 * (6 if layout.checkpointing == "full" else 4)
    num_bytes = 2 * layout.micro_batch * model.length * model.width
    return rings * ring_seconds(machine, num_bytes, layout.tensor, span=layout.tensor)


def _logit_seconds(model: Transformer, layout: Layout, machine: Machine) -> float:
    tokens, columns = layout.micro_batch * model.length, model.vocabulary / layout.tensor
    return 3 * matmul_seconds(machine, tokens, model.width, columns)


def _pipeline_seconds(model: Transformer, layout: Layout, m: int, machine: Machine) -> float:
    if layout.pipeline == 1:
        return 0
    num_bytes = 2 * layout.micro_batch * model.length * model.width / layout.tensor
    span = layout.data * layout.tensor * layout.pipeline
    return 2 * layout.chunks * m * send_seconds(machine, num_bytes, span)


def _data_seconds(model: Transformer, layout: Layout, m: int, machine: Machine) -> float:
    rings = {2: m + 1, 3: 3 * m}.get(layout.zero_stage, 2)
    num_bytes = 2 * parameters_per_rank(model, layout)
    return rings * ring_seconds(machine, num_bytes, layout.data, layout.data * layout.tensor)


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
    for t, p in product(divisors(gcd(model.heads, machine.gpus_per_node)), divisors(model.layers)):
        d = machine.gpus // (t * p)
        if machine.gpus % (t * p) or batch_size % d:
            continue
        zero_stages = range(1 if d == 1 else 2 if p > 1 else 4)
        sequence_parallel = (False, True) if t > 1 and model.length % t == 0 else (False,)
        for b in divisors(batch_size // d):
            is_even = p > 1 and batch_size // (d * b) % p == 0
            chunks = divisors(model.layers // p) if is_even else [1]
            for v, zero, kept, is_split in product(
                chunks, zero_stages, CHECKPOINTING, sequence_parallel
            ):
                yield Layout(d, t, p, v, b, zero, kept, is_split)


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
    needs = {
        layout: estimate_memory(model, layout, batch_size)
        for layout in layouts(model, machine, batch_size)
    }
    if not needs:
        raise ValueError(
            f"no layout is valid: {machine.gpus} GPUs cannot share the model and batches of "
            f"{batch_size} sequences evenly"
        )
    smallest = min(memory.total for memory in needs.values())
    if smallest > machine.memory_bytes:
        raise ValueError(
            f"no layout fits: the smallest need is {smallest / 1e9:.1f} GB of memory on each GPU, "
            f"which has {machine.memory_bytes / 1e9:.1f} GB"
        )
    found = [
        Plan(layout, memory, estimate_step_time(model, layout, batch_size, machine))
        for layout, memory in needs.items()
        if memory.total <= machine.memory_bytes
    ]
    return sorted(found, key=lambda one: one.time.total)
