"""Automatic sharding: how much memory and time a layout needs, and which layout is the fastest.

Nothing is trained here: the functions only estimate what a training step would need. Planning for a
thousand GPUs takes a fraction of a second.
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
    """Return the number of parameters that a rank of the first stage computes with.

    The first stage has l/p layers and the embeddings of V tokens and s positions; the ranks of its
    tensor group share all of them evenly. A layer has four products, with weights of (h, 3h),
    (h, h), (h, 4h) and (4h, h) and a bias for each column, and two norms, with a weight and a bias
    for each of h columns.
        GPT-3, l = 96, h = 12288, V = 51200, s = 2048, t = p = 8  ->  2.80 billion

    (In reality, every rank of the group has a full copy of the norms and some biases, about
    1/10,000 of a layer.)

    Args:
        model, layout: the transformer and its layout; ``layout.pipeline`` divides the number of
            layers.

    Returns:
        The number of parameters; rounding it to an integer is allowed. ZeRO sharding changes which
        ranks store the parameters, not which ranks compute with them, so it does not matter here.

    Source: Narayanan et al. 2021, section 5.1, equation 2.
    """
    h = model.width
    of_layers = model.layers / layout.pipeline * (12 * h**2 + 13 * h)
    of_embeddings = (model.vocabulary + model.length) * h
    return (of_layers + of_embeddings) / layout.tensor


def activation_bytes_per_layer(
    model: Transformer, layout: Layout, checkpointing: Checkpointing
) -> float:
    """Return the bytes that a rank keeps per layer for the backward pass of one micro-batch.

    The section of this task lists what the operations of a layer keep, and says what the t ranks
    share. Each value takes 2 bytes, and each entry of a dropout mask 1 byte.
        checkpointing                                        none   selective      full
        kept                                                  all   no scores   the input
        GPT-3, b = 1, t = 8                                579 MB      327 MB   50.3 MB
        GPT-3, b = 1, t = 8, with sequence parallelism     359 MB      107 MB   6.29 MB
    "No scores" means no tensor with an entry for each pair of tokens, whatever operation keeps it.

    Args:
        model: the transformer.
        layout: the layout; only tensor, micro_batch and sequence_parallel matter here.
        checkpointing: kind of checkpointing to assume; ``layout.checkpointing`` is ignored.

    Returns:
        The number of bytes.

    Source: Korthikanti et al. 2022, section 4, table 2.
    """
    b, s, h, t = layout.micro_batch, model.length, model.width, layout.tensor
    u = t if layout.sequence_parallel else 1
    if checkpointing == "full":
        return 2 * s * b * h / u
    scores = 5 * model.heads * s**2 * b / t if checkpointing == "none" else 0
    return s * b * h * (10 / u + 24 / t) + scores


def layers_in_flight(model: Transformer, layout: Layout, batch_size: int) -> float:
    """Return the number of layers whose activations the first stage holds at the same time.

    A stage has v chunks of l/(pv) layers. Before its first backward pass, the first stage runs the
    following number of forward passes, each through one of its chunks, and it holds the activations
    of all of them:
        1F1B (v = 1)     p, or m if that is less
        interleaved      vp + p - 1, or vm if that is less
        l = 96, p = 8, m = 64  ->  96 layers with v = 1 and 124 with v = 3

    Args:
        model, layout: the transformer and its layout; p · v divides the number of layers.
        batch_size: sequences in a step, over all copies of the model; m, the number of
            micro-batches of a copy, follows from it.

    Returns:
        The number of layers; a layer counts once for each micro-batch whose activations it holds.

    Source: Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.
    """
    p, v = layout.pipeline, layout.chunks
    passes = p if v == 1 else v * p + p - 1
    return min(passes, v * layout.micro_batches(batch_size)) * model.layers / (p * v)


def estimate_memory(model: Transformer, layout: Layout, batch_size: int) -> Memory:
    """Return the peak memory of a rank of the first stage, broken down into its parts.

    The rank trains in mixed precision with Adam:
        parameters    2 bytes each; ZeRO 3 shards them over the d copies
        gradients     2 bytes each; ZeRO 2 and 3 shard them
        optimizer     a copy of the parameters in float32, and two moments; ZeRO 1, 2 and 3 shard it
        activations   what all layers in flight keep, checkpointed as in the layout
        recomputed    what the one layer that goes backward holds beyond what it has kept
        logits        (bs, V) in float32, shared by t ranks, on the last stage; 0 if it is another
        7.5 billion parameters, d = 64  ->  the first three parts add up to 120, 31.4, 16.6 and
        1.88 GB with ZeRO 0, 1, 2 and 3

    Args:
        model, layout: as for the functions above; d · b divides the batch size. None of this is
            checked.
        batch_size: sequences in a step, over all copies of the model.

    Returns:
        The parts, in bytes; each may be rounded to an integer. Their sum is ``total``. Library
        workspace, fragmentation and message buffers are not included.

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
    """Return the forward time of attention for one micro-batch, not counting its linear layers.

    The t ranks share the a heads of each sequence. A head multiplies queries by keys, which makes
    scores of (s, s), and these by values. In between, softmax and dropout read and write the scores
    in the GPU's memory, as the section of this task says.
        GPT-3, b = 1, t = 8, 312 TFLOP/s and 2 TB/s, at full efficiency  ->  0.31 ms

    Args:
        model: the transformer; its number of heads divides its width.
        layout: the layout; only tensor and micro_batch matter here, and tensor divides the number
            of heads.
        machine: the machine; products take ``matmul_seconds``, and each byte that is read or
            written takes 1 / memory_bytes_per_s seconds.

    Returns:
        The sum of these times, in seconds: nothing overlaps.
    """
    s, of_head = model.length, model.width / model.heads
    heads = layout.micro_batch * model.heads / layout.tensor
    scores = matmul_seconds(machine, s, of_head, s, heads)
    context = matmul_seconds(machine, s, s, of_head, heads)
    return scores + context + 9 * s**2 * heads / machine.memory_bytes_per_s


def forward_seconds(model: Transformer, layout: Layout, machine: Machine) -> float:
    """Return how long one micro-batch's forward pass through one layer takes on a rank.

    The time is ``attention_seconds``, plus that of the layer's four products on this rank, which
    are split as in tasks 2.12 to 2.15, plus that of the memory traffic of norms, dropout with sums,
    and GELU, of which the section of this task has a list.
        GPT-3, b = 1, t = 8, 312 TFLOP/s and 2 TB/s, at full efficiency  ->  3.58 ms, and 3.34 ms
        with sequence parallelism

    Args:
        model: the transformer; its number of heads divides its width.
        layout: the layout; only tensor, micro_batch and sequence_parallel matter here, and tensor
            divides the number of heads.
        machine: the machine, as for ``attention_seconds``.

    Returns:
        The sum of these times, in seconds: nothing overlaps, and messages are not included.
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
    """Return how long a step takes, broken down into its parts.

    All micro-batches of a copy pass through the l/p layers of a stage. A backward pass takes twice
    as long as the forward pass, logits included. Before it, selective checkpointing repeats
    attention, and full checkpointing repeats the whole forward pass of a layer, messages included.
        compute      layers and logits; these are products of (bs, h) and (h, V/t)
        tensor       all-reduces of 2bsh bytes among t ranks, forward and backward: for attention
                     one each, and for the MLP one each
        pipeline     messages of 2bsh/t bytes, forward and backward, one for each micro-batch and
                     chunk; none if p = 1
        bubble       p - 1 micro-batches, forward and backward through one chunk of a stage, with
                     the messages of tensor ranks and without logits
        data         rings of 2Ψ bytes among the d copies, as far as they take longer than twice the
                     forward time of the stage's layers for one micro-batch (``forward_seconds``,
                     no logits, no messages): with ZeRO 0 and 1, an all-reduce, or its two
                     halves; with ZeRO 2, gradients are scattered for each micro-batch, and
                     parameters gathered once; with ZeRO 3, parameters are gathered for each forward
                     and for each backward pass, too
        GPT-3, t = p = 8, v = 3, b = 1, m = 64, selective, sequence parallelism, A100s
                     ->  11.8, 1.43, 0.10, 0.47 and 0 s

    A ring is one reduce-scatter or all-gather of Ψ parameters or gradients, or of what a layer puts
    out; an all-reduce is two. (Sequence parallelism replaces each all-reduce with two rings, which
    take the same time.) A tensor group spans t neighbouring GPUs, the d copies span dt GPUs, and a
    pipeline spans dtp GPUs.

    Args:
        model, layout: as for ``estimate_memory``.
        batch_size: sequences in a step, over all copies of the model.
        machine: machine that the model runs on.

    Returns:
        The parts, in seconds; their sum is ``total``. The time of the optimizer, a few hundredths
        of a second, is not included.

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
        t divides the number of GPUs per node and the number of heads,
        p · v divides the number of layers, and v = 1 unless p > 1 and m is a multiple of p,
        d · b divides the batch size,
        the ZeRO stage is 0 if d = 1; otherwise, 0 or 1 with a pipeline, and 0 to 3 without one,
        checkpointing is any of ``CHECKPOINTING``, and
        sequence parallelism is on only if t > 1 and t divides the length.

        2 layers, 2 heads, 2 GPUs in a node, a batch of 2 sequences, an even length  ->  30 layouts

    Args:
        model: the transformer.
        machine: the machine; only its numbers of nodes and of GPUs per node matter here.
        batch_size: sequences in a step, over all copies of the model.

    Returns:
        An iterable of the layouts: a generator or a list.

    Cost: a thousand GPUs allow only a few thousand layouts, so do not try combinations that cannot
        be valid.
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
    """Return all layouts that fit into the memory of a GPU, fastest first.

    The memory and the time of a layout are the ``total`` of its two estimates. Layouts that are
    equally fast may be in any order. For example:
        GPT-3 on 8 nodes of 8 A100s, 64 sequences  ->  376 layouts fit, the best with t = 4, p = 8

    Args:
        model: the transformer.
        machine: machine that the model runs on; a layout fits if it needs at most ``memory_bytes``.
        batch_size: sequences in a step, over all copies of the model.

    Returns:
        Each of these layouts, with the results of ``estimate_memory`` and ``estimate_step_time``
        for it.

    Raises:
        ValueError: no layout is valid, and the message names the number of GPUs and the batch size;
            or no valid layout fits, and the message names the smallest memory that any of them
            needs, in GB (10⁹ bytes) and rounded to one decimal, such as 91.2.

    Cost: one memory estimate per layout, and one time estimate for each that fits.
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
