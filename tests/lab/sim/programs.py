"""Programs that run on both simulated and real ranks, to compare the results rank by rank.

Each program in ``CALLS`` covers one form of a ``torch.distributed`` call. Values are small whole
numbers, so that their sums are exact in any order and in every dtype.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

Program = Callable[[], object]

CALLS: dict[str, Program] = {}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 2), (0, 4))
OPS = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE_OPS = ("BAND", "BOR", "BXOR")


def call(program: Program) -> Program:
    """Add a program to ``CALLS``."""
    CALLS[program.__name__] = program
    return program


def all_calls() -> dict[str, object]:
    """Run all programs in one world, one after another; return their results by name."""
    warnings.simplefilter("ignore")  # torch 2.13 deprecates the old names, 2.11 lacks the new ones
    return {name: without_leftovers(program) for name, program in CALLS.items()}


def without_leftovers(program: Program) -> object:
    """Run a program, destroy the groups that it made, and return its result."""
    result = program()
    dist.barrier()
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return result


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def values(
    *shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None, low: int = 1
) -> Tensor:
    """Return random whole numbers from ``low`` to 4, seeded by ``rank`` (default: this rank)."""
    generator = torch.Generator().manual_seed(100 + (me() if rank is None else rank))
    return torch.randint(low, 5, shape, generator=generator).to(dtype)


def blanks(
    *shape: int, count: int | None = None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return tensors to be overwritten: one per rank, or ``count`` of them."""
    return [torch.full(shape, 9, dtype=dtype) for _ in range(size() if count is None else count)]


SETTLE_S = 0.05  # an immediate barrier would re-raise the error that gloo's thread still holds


def refusal(function: Callable[[], object]) -> str:
    """Return the text of the exception that ``function`` raises immediately, on every rank."""
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        time.sleep(SETTLE_S)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def is_refused(function: Callable[[], object]) -> bool:
    """Return True if ``function`` raises immediately, whatever the message."""
    return refusal(function) != "nothing was raised"


def waited(work: dist.Work | None) -> object:
    """Wait for a message, but only once, because gloo hangs in a second wait."""
    assert isinstance(work, dist.Work)
    return work.wait()


def finished(work: dist.Work | None) -> tuple[object, ...]:
    """Wait twice for an asynchronous collective; return both results."""
    return waited(work), work.wait()


def neighbours() -> tuple[int, int]:
    """Return this rank's right and left neighbours in a ring."""
    return (me() + 1) % size(), (me() - 1) % size()


def others() -> list[int]:
    return [rank for rank in range(size()) if rank != me()]


# --- point to point ------------------------------------------------------------------------------


@call
def send_and_recv_of_every_dtype_and_shape() -> object:
    arrived = []
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.int16):
        for shape in SHAPES:
            x = values(*shape, dtype=dtype)
            if me() == 0 and size() > 1:
                arrived.append(dist.send(x, 1))
            elif me() == 1:
                arrived.append((dist.recv(x, 0), x))
    return arrived


@call
def tags_tell_messages_apart() -> object:
    if me() == 0 and size() > 1:
        return [waited(w) for w in [dist.isend(torch.tensor([k]), 1, tag=k) for k in range(3)]]
    if me() == 1:
        buffers = blanks(1, count=3, dtype=torch.int64)
        return [dist.recv(buffers[k], 0, tag=k) for k in (2, 0, 1)], buffers
    return None


@call
def recv_from_any_source() -> object:
    if me() == size() - 1:
        x = torch.zeros(2)
        return sorted((dist.recv(x), x.tolist()) for _ in others())
    return dist.send(values(2), size() - 1)


@call
def irecv_from_any_source_with_a_tag() -> object:
    if me() == 0:
        buffers = blanks(1, count=size() - 1)
        works = [dist.irecv(buffer, tag=3) for buffer in buffers]
        return sorted((waited(w), b.item()) for w, b in zip(works, buffers, strict=True))
    return dist.send(torch.tensor([1.0 * me()]), 0, tag=3)


@call
def recv_into_another_shape() -> object:
    if me() == 0 and size() > 1:
        return dist.send(values(2, 3), 1)
    x = torch.zeros(3, 2)
    return dist.recv(x, 0) if me() == 1 else None, x


@call
def batch_by_ranks_of_a_group() -> object:
    group = dist.new_group([rank for rank in range(size()) if rank % 2 == 0])
    if me() % 2 or size() < 3:
        return None
    arrived, count = torch.zeros(3), dist.get_world_size(group)
    right, left = (dist.get_rank(group) + 1) % count, (dist.get_rank(group) - 1) % count
    operations = [
        dist.P2POp(dist.isend, values(3), group=group, group_peer=right),
        dist.P2POp(dist.irecv, arrived, group=group, group_peer=left),
    ]
    return [waited(work) for work in dist.batch_isend_irecv(operations)], arrived


@call
def point_to_point_in_a_group_names_global_ranks() -> object:
    last = size() - 1
    group = dist.new_group([0, last]) if size() > 2 else None
    if size() <= 2 or me() not in (0, last):
        return None
    x = torch.zeros(2)
    if me() == 0:
        dist.send(values(2), last, group)
        return dist.recv(x, group=group, group_src=1), x
    source = dist.recv(x, 0, group)
    dist.send(x + 1, group=group, group_dst=0)
    return source, x


@call
def groups_of_the_same_ranks_do_not_mix_their_messages() -> object:
    if size() == 1:
        return None
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if me() == 0:
        works = [dist.isend(torch.tensor([k]), 1, group) for k, group in ((1, first), (2, second))]
        return [waited(work) for work in works]
    x, y = torch.tensor([0]), torch.tensor([0])
    return [dist.recv(y, 0, second), dist.recv(x, 0, first), x, y] if me() == 1 else None


@call
def what_is_not_contiguous_is_not_sent() -> object:
    if size() == 1:
        return None
    right, left = neighbours()
    x = values(3, 2).t()
    return is_refused(lambda: dist.isend(x, right)), is_refused(lambda: dist.irecv(x, left))


@call
def lists_of_objects_are_sent_and_received() -> object:
    objects: list[Any] = [{"rank": me()}, "text", torch.tensor([me()])]
    arrived: list[Any] = [None] * 3
    if me() == 0:
        return [(dist.recv_object_list(arrived, src=rank), list(arrived)) for rank in others()]
    return dist.send_object_list(objects, 0)


# --- collectives ---------------------------------------------------------------------------------


@call
def broadcast_from_every_root() -> object:
    return [
        (dist.broadcast(x, root), x)
        for root in range(size())
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
        for shape in SHAPES
        for x in [values(*shape, dtype=dtype)]
    ]


@call
def all_reduce_with_every_operator() -> object:
    results = {}
    for name in (*OPS, *BITWISE_OPS):
        for dtype in (*FLOATS, *INTEGERS) if name in OPS else INTEGERS:
            # products need small factors (1 or 2), because 4 ** 8 overflows some dtypes
            x = values(7, dtype=dtype).clamp(max=2) if name == "PRODUCT" else values(7, dtype=dtype)
            result = dist.all_reduce(x, getattr(dist.ReduceOp, name))
            results[f"{name} {dtype}"] = result, x
    return results


@call
def all_reduce_of_bool_and_complex() -> object:
    x, y = values(5, dtype=torch.complex64), values(6, low=0).bool()
    dist.all_reduce(x)
    dist.all_reduce(y, dist.ReduceOp.MAX)
    return x, y, refusal(lambda: dist.all_reduce(x, dist.ReduceOp.PRODUCT))


@call
def all_reduce_of_the_mean() -> object:
    return [
        (dist.all_reduce(x, op=dist.ReduceOp.AVG), x)
        for dtype in (torch.float32, torch.float64)
        for x in [values(5, dtype=dtype) * size()]  # so that the mean is a whole number
    ]


@call
def images_are_reduced_and_broadcast_as_they_lie() -> object:
    x, y = (values(2, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2))
    dist.all_reduce(x)
    dist.broadcast(y, size() - 1)
    return x, y, x.is_contiguous(), y.is_contiguous()


@call
def all_reduce_of_a_leaf_that_requires_grad() -> object:
    x = values(3).requires_grad_()
    dist.all_reduce(x)
    (x * 2).sum().backward()
    return x.detach(), x.grad, x.requires_grad, x.is_leaf


@call
def reduce_to_every_root() -> object:
    results = []
    for root in range(size()):
        for name in OPS:
            x = values(5).clamp(max=2)
            result = dist.reduce(x, root, getattr(dist.ReduceOp, name))
            results.append((result, x if me() == root else None))  # gloo overwrites x on all ranks
    return results


@call
def reductions_of_complex_numbers() -> object:
    op, kinds = dist.ReduceOp, (torch.complex64, torch.complex128)
    results: list[object] = []
    for dtype in kinds:
        for name in ("SUM", "AVG"):
            x = values(2 * size(), dtype=dtype) * size() * (1 - 2j)  # makes the mean a whole number
            [y], [z], mine = blanks(2, count=1, dtype=dtype), blanks(2, count=1, dtype=dtype), x + 1
            dist.reduce(mine, 0, getattr(op, name))
            dist.reduce_scatter(y, list(x.chunk(size())), getattr(op, name))
            dist.reduce_scatter_tensor(z, x, getattr(op, name))
            results.append((mine if me() == 0 else None, y, z))
    x, [y] = values(2 * size(), dtype=kinds[0]), blanks(2, count=1, dtype=kinds[0])
    return (
        results,
        is_refused(lambda: dist.reduce(x, 0, op.PRODUCT)),
        is_refused(lambda: dist.reduce_scatter_tensor(y, x, op.MAX)),
    )


@call
def all_gather_of_every_dtype_and_shape() -> object:
    results = []
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for shape in SHAPES:
            outputs = blanks(*shape, dtype=dtype)
            results.append((dist.all_gather(outputs, values(*shape, dtype=dtype)), outputs))
    return results


@call
def all_gather_of_several_tensors_at_once() -> object:
    outputs = [blanks(1, count=1) + blanks(2, 2, count=1) for _ in range(size())]
    return dist.all_gather_coalesced(outputs, [values(1), values(2, 2)]), outputs


@call
def all_gather_refuses_what_does_not_fit() -> object:
    x = values(2, 3)
    return (
        is_refused(lambda: dist.all_gather(blanks(6), x)),
        is_refused(lambda: dist.all_gather(blanks(2, 3, count=size() + 1), x)),
        is_refused(lambda: dist.all_gather(blanks(2, 3, dtype=torch.int64), x)),
        is_refused(lambda: dist.all_gather_into_tensor(torch.zeros(2 * size() + 1, 3), x)),
        is_refused(lambda: dist.all_gather_into_tensor(torch.zeros(2 * size(), 3).int(), x)),
    )


@call
def only_shapes_that_follow_dim_0_are_gathered_and_scattered_in_one_tensor() -> object:
    results: list[object] = []
    for part, whole in (
        *(((3,), (3 * size(),)), ((1, 3), (size(), 3)), ((2, 3), (2 * size(), 3))),
        *(((3,), (size(), 3)), ((2, 3), (size(), 2, 3)), ((2, 3), (6 * size(),))),
        *(((6,), (2 * size(), 3)), ((2, 3), (2, 3 * size())), ((2, 3), (3 * size(), 2))),
        *(((1, 1), (size(),)), ((3,), (3 * size(), 1)), ((1, 2, 3), (2 * size(), 3))),
        *(((2, 3), (1, 2 * size(), 3)), ((0,), (0,)), ((0, 3), (0, 3)), ((0,), (size(), 0))),
    ):
        x, [y], z = values(*part), blanks(*part, count=1), torch.zeros(whole)
        gathers = is_refused(lambda z=z, x=x: dist.all_gather_into_tensor(z, x))
        scatters = is_refused(lambda y=y, w=whole: dist.reduce_scatter_tensor(y, values(*w)))
        results.append((part, whole, gathers, z, scatters, y))
    y = torch.zeros(size())
    return results, is_refused(lambda: dist.all_gather_into_tensor(y, torch.ones(())))


@call
def gather_to_every_root() -> object:
    results = []
    for root in range(size()):
        for shape in SHAPES:
            outputs = blanks(*shape) if me() == root else None
            results.append((dist.gather(values(*shape), outputs, root), outputs))
    return results


@call
def gather_refuses_a_list_on_a_rank_that_is_not_the_root() -> object:
    if me() == 0:
        return refusal(lambda: dist.gather(values(2), dst=0))
    return refusal(lambda: dist.gather(values(2), blanks(2), dst=0))


@call
def scatter_from_every_root() -> object:
    results = []
    for root in range(size()):
        for shape in SHAPES:
            [x] = blanks(*shape, count=1)
            inputs = [values(*shape, rank=rank) for rank in range(size())]
            results.append((dist.scatter(x, inputs if me() == root else None, root), x))
    return results


@call
def reduce_scatter_of_lists() -> object:
    results = []
    for name in OPS:
        for shape in SHAPES:
            inputs = [values(*shape, rank=me() + rank).clamp(max=2) for rank in range(size())]
            [x] = blanks(*shape, count=1)
            results.append((dist.reduce_scatter(x, inputs, getattr(dist.ReduceOp, name)), x))
    return results


@call
def reduce_scatter_of_one_tensor() -> object:
    results = []
    for name in OPS:
        for shape in ((1,), (0,), (3, 2)):
            x = values(shape[0] * size(), *shape[1:]).clamp(max=2)
            [y] = blanks(*shape, count=1)
            results.append((dist.reduce_scatter_tensor(y, x, getattr(dist.ReduceOp, name)), y))
    return results


@call
def all_to_all_of_lists() -> object:
    results = []
    for shape in SHAPES:
        inputs = [values(*shape, rank=me() + rank) for rank in range(size())]
        outputs = blanks(*shape)
        results.append((dist.all_to_all(outputs, inputs), outputs))
    return results


@call
def all_to_all_into_its_own_input() -> object:
    x = values(size(), 3)
    dist.all_to_all(list(x.unbind()), list(x.unbind()))
    return x


@call
def all_to_all_of_one_tensor() -> object:
    results = []
    for shape in ((1,), (0,), (3, 2)):
        x = values(shape[0] * size(), *shape[1:])
        y = torch.zeros_like(x)
        results.append((dist.all_to_all_single(y, x), y))
    return results


@call
def all_to_all_of_unequal_parts() -> object:
    """Exchange unequal parts: rank r sends (r + k) % 3 rows to rank k, sometimes none."""
    splits = [(me() + rank) % 3 for rank in range(size())]
    x, y = values(sum(splits), 2), torch.zeros(sum(splits), 2)
    return dist.all_to_all_single(y, x, splits, splits), y


@call
def all_to_all_refuses_what_does_not_fit() -> object:
    x = values(2 * size())
    splits = [2] * (size() - 1) + [1]
    return (
        is_refused(lambda: dist.all_to_all_single(torch.zeros(2 * size()), x, None, splits)),
        is_refused(lambda: dist.all_to_all_single(torch.zeros(2 * size()), x, None, [2])),
        is_refused(lambda: dist.all_to_all_single(x.clone().int(), x)),
        is_refused(lambda: dist.all_to_all_single(values(2 * size(), 2).t(), x)),
        is_refused(lambda: dist.all_to_all(blanks(2, count=size() + 1), blanks(2))),
    )


@call
def monitored_barrier() -> object:
    return dist.monitored_barrier()


@call
def every_collective_is_asynchronous_if_told() -> object:
    roots = blanks(2) if me() == 0 else None
    inputs = [values(2, rank=rank) for rank in range(size())]
    a, b, c, [d], [e] = values(2), values(2), values(2), blanks(2, count=1), blanks(2, count=1)
    f, g, h = torch.zeros(2), torch.zeros(2 * size()), torch.zeros(2 * size())
    gathered, exchanged, several = blanks(2), blanks(2), [values(2), values(3)]
    works = [
        dist.broadcast(a, 0, async_op=True),
        dist.all_reduce(b, async_op=True),
        dist.reduce(c, 0, async_op=True),
        dist.all_gather(gathered, values(2), async_op=True),
        dist.all_gather_into_tensor(g, values(2), async_op=True),
        dist.gather(values(2), roots, 0, async_op=True),
        dist.scatter(d, inputs if me() == 0 else None, 0, async_op=True),
        dist.reduce_scatter(e, inputs, async_op=True),
        dist.reduce_scatter_tensor(f, values(2 * size()), async_op=True),
        dist.all_to_all(exchanged, inputs, async_op=True),
        dist.all_to_all_single(h, values(2 * size()), async_op=True),
    ]
    future = dist.all_reduce_coalesced(several, async_op=True)
    waits = [future.wait(), *(finished(work) for work in works)]
    results = [a, b, c if me() == 0 else None, d, e, f, g, h, roots, gathered, exchanged, several]
    return waits, results


@call
def futures_hold_the_outputs_and_call_back() -> object:
    inputs = [values(2, rank=rank) for rank in range(size())]
    works = [
        dist.broadcast(values(2), 0, async_op=True),
        dist.all_reduce(values(3), async_op=True),
        dist.all_gather(blanks(2), values(2), async_op=True),
        dist.all_gather_into_tensor(torch.zeros(2 * size()), values(2), async_op=True),
        dist.scatter(torch.zeros(2), inputs if me() == 0 else None, 0, async_op=True),
        dist.all_to_all(blanks(2), inputs, async_op=True),
        dist.all_to_all_single(torch.zeros(size()), values(size()), async_op=True),
    ]
    futures = [work.get_future() for work in works]
    then = futures[1].then(lambda future: future.value()[0] * 10).then(lambda f: f.value() + 1)
    return [future.wait() for future in futures], then.wait(), [f.done() for f in futures]


@call
def collectives_are_coalesced() -> object:
    x, y, z = values(2), values(3), torch.zeros(2 * size())
    with c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    with c10d._coalescing_manager(async_ops=True) as gathering:
        dist.all_gather_into_tensor(z, x)
    gathering.wait()
    u, v = values(2 * size()), torch.zeros(2)
    with c10d._coalescing_manager(async_ops=True) as scattering:
        dist.reduce_scatter_tensor(v, u)
    scattering.wait()
    return x, y, z, v


# --- objects -------------------------------------------------------------------------------------


def thing() -> dict[str, object]:
    """Return an object whose pickle is longer on higher ranks."""
    return {"rank": me(), "text": "x" * me(), "tensor": values(2), "shapes": [torch.Size([me()])]}


@call
def objects_are_broadcast() -> object:
    results = []
    for root in range(size()):
        objects = [thing(), me(), None] if me() == root else [None, None, None]
        results.append((dist.broadcast_object_list(objects, src=root), objects))
    return results


# --- groups --------------------------------------------------------------------------------------


def sums(group: dist.ProcessGroup | None) -> object:
    """Return a group's numbering and a sum over it; on non-members, get_rank's result or None."""
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return dist.get_rank(group) if group is not None else None
    x = values(2)
    dist.all_reduce(x, group=group)
    ranks = dist.get_process_group_ranks(group)
    numbers = [dist.get_group_rank(group, rank) for rank in ranks]
    back = [dist.get_global_rank(group, number) for number in numbers]
    return dist.get_rank(group), dist.get_world_size(group), ranks, numbers, back, x


@call
def groups_named_in_another_order_overlapping_and_nested() -> object:
    ranks = list(range(size()))
    groups = [
        dist.new_group(),
        dist.new_group(ranks[::-1]),
        dist.new_group(ranks[: size() // 2 + 1]),
        dist.new_group(ranks[size() // 2 :]),
        dist.new_group(ranks[::2]),
        dist.new_group([size() - 1]),
    ]
    return [sums(group) for group in groups]


@call
def roots_of_a_group_are_global_or_of_the_group() -> object:
    last = size() - 1
    group = dist.new_group([0, last] if last else [0])
    if me() not in (0, last):
        return None
    x, y = values(2), values(2)
    dist.broadcast(x, last, group)
    dist.broadcast(y, group=group, group_src=0)
    gathered = blanks(2, count=dist.get_world_size(group)) if me() == last else None
    dist.gather(values(2), gathered, last, group)
    z = values(2)
    dist.reduce(z, group=group, group_dst=0)
    return x, y, gathered, z if me() == 0 else None


@call
def a_destroyed_group_is_gone() -> object:
    group = dist.new_group()
    before = sums(group)
    dist.destroy_process_group(group)
    return before, sums(dist.new_group()), is_refused(lambda: dist.get_rank(group))


# --- device meshes and functional collectives ----------------------------------------------------


def mesh_shape() -> tuple[int, int]:
    rows = 2 if size() % 2 == 0 else 1
    return rows, size() // rows


@call
def meshes_have_a_group_per_dim() -> object:
    mesh = init_device_mesh("cpu", mesh_shape(), mesh_dim_names=("row", "column"))
    by_dim = [sums(mesh[name].get_group()) for name in ("row", "column")]
    flat = sums(mesh._flatten("all").get_group())
    return by_dim, flat, mesh.get_coordinate(), mesh.get_local_rank("row"), mesh.mesh


@call
def functional_collectives_of_the_world() -> object:
    group, x = dist.group.WORLD, values(2 * size(), 2)
    splits = [2] * size()
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(x, "max", group),
        functional.all_gather_tensor(x, 0, group),
        functional.all_gather_tensor(x, 1, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, splits, splits, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, size() - 1, group),
        functional.permute_tensor(x[:, 0], [(rank + 1) % size() for rank in range(size())], group),
        *functional.all_reduce_coalesced([x, x + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x[0] + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(result) for result in results], x


@call
def functional_collectives_along_a_mesh() -> object:
    mesh = init_device_mesh("cpu", mesh_shape())
    results = []
    for dim, count in enumerate(mesh_shape()):
        x = values(count, 2)
        results += [
            functional.all_reduce(x, "sum", (mesh, dim)),
            functional.all_gather_tensor(x, 0, (mesh, dim)),
            functional.reduce_scatter_tensor(x, "avg", 0, (mesh, dim)) * count,
        ]
    return [result.clone() for result in results]


@call
def functional_collectives_have_gradients() -> object:
    results = []
    for collective in (
        lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD),
        lambda x: functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD),
    ):
        x = values(size(), 2).requires_grad_()
        y = collective(x)
        (y * y).sum().backward()
        results.append((y.detach().clone(), x.grad))
    return results


@call
def differentiable_collectives() -> object:
    results = []
    for collective in (
        differentiable.all_reduce,
        lambda x: torch.cat(differentiable.all_gather(x)),
        lambda x: differentiable.broadcast(x, 0),
        lambda x: differentiable.all_to_all_single(torch.empty_like(x), x),
    ):
        x = values(size(), 2).requires_grad_()
        y = collective(x)
        (y * y).sum().backward()
        results.append((y.detach().clone(), x.grad))
    return results
