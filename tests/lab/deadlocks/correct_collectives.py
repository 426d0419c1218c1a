"""Correct programs: collectives and groups, each at its own pace."""

import time

import torch
import torch.distributed as dist
from catalogue import me, received, reduced, returns, size, value
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store


@returns([[1, 3], [1, 3]])
def async_and_late() -> object:
    """Two collectives are under way at once and awaited in reverse."""
    tensors = [value(me()), value(me() + 1)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    return [x.item() for x in tensors]


@returns([[5, 2], [None, 2]])
def message_under_a_collective() -> object:
    """A rank receives while a collective that it has begun waits for the sender."""
    x = value(1)
    if me() == 0:
        work = dist.all_reduce(x, async_op=True)
        message = received(1)
        work.wait()
        return [message, x.item()]
    dist.send(value(5), 0)
    dist.all_reduce(x)
    return [None, x.item()]


@returns([[1, 3], [1, 3, 3], [3, 3]])
def overlapping_groups() -> object:
    """Groups that share a rank, used in the same order by those that share them."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    results = [
        reduced(me(), group)
        for group, ranks in zip(groups, ((0, 1), (1, 2)), strict=True)
        if me() in ranks
    ]
    return [*results, reduced(me())]


@returns([[1, 2], [1, 4], [5, 2], [5, 4]])
def rows_then_columns_for_some() -> object:
    """On a 2×2 mesh one rank begins with its column; the others' order leaves a way."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = [("row", rows[me() // 2]), ("column", columns[me() % 2])]
    sums = {name: reduced(me(), group) for name, group in (both[::-1] if me() == 0 else both)}
    return [sums["row"], sums["column"]]


@returns([20, 20, 1, 1])
def groups_at_their_own_pace() -> object:
    """One half does ten steps while the other does one; then all meet."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][me() // 2]
    total = sum(reduced(1, half) for _ in range(10)) if me() < 2 else reduced(0.5, half)
    dist.barrier()
    return total


@returns([0, 1, 2, 3])
def barriers_of_parts() -> object:
    """Barriers of a group do not concern the others, which have none."""
    pair = dist.new_group([1, 2])
    if me() in (1, 2):
        for _ in range(3):
            dist.barrier(pair)
    return me()


@returns([[6, 3], [6, 3], [6, None], [6, None], [None, None]])
def groups_inside_groups() -> object:
    """A group of a group; all ranks create all groups, members or not."""
    four = dist.new_group([0, 1, 2, 3])
    two = dist.new_group([0, 1])
    return [
        reduced(me(), four) if me() < 4 else None,
        reduced(me() + 1, two) if me() < 2 else None,
    ]


@returns([1, 1, 5, 5])
def group_made_by_its_members() -> object:
    """With use_local_synchronization the members alone create a group."""
    first = me() // 2 * 2
    pair = dist.new_group([first, first + 1], use_local_synchronization=True)
    return reduced(me(), pair)


@returns([[1, 2], [1, 4], [5, 2], [5, 4]])
def device_mesh() -> object:
    """The same rows and columns, made by torch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
    return [reduced(me(), mesh.get_group("row")), reduced(me(), mesh.get_group("column"))]


@returns([15] * 6)
def hierarchical_all_reduce() -> object:
    """To the leader of the node, among the leaders, back to all."""
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    leaders = dist.new_group([0, 3])
    leader, x = me() // 3 * 3, value(me())
    dist.reduce(x, leader, group=nodes[me() // 3])
    if me() == leader:
        dist.all_reduce(x, group=leaders)
    dist.broadcast(x, leader, group=nodes[me() // 3])
    return x.item()


@returns([[[0, 1, 2], 3], [[0, 1, 2], 3], [[0, 1, 2], 3]])
def every_rank_is_root() -> object:
    """The root of a collective may change from call to call, as long as all agree."""
    roots = []
    for root in range(size()):
        x = value(me())
        dist.broadcast(x, root)
        roots.append(x.item())
    total = value(me())
    dist.reduce(total, size() - 1)
    dist.broadcast(total, size() - 1)
    return [roots, total.item()]


@returns([[0, 10], [1, 1, 11, 11]])
def uneven_all_to_all() -> object:
    """Rank k gets k + 1 elements of everybody."""
    mine = torch.tensor([0.0, 1.0, 1.0]) + 10 * me()
    output = torch.zeros(size() * (me() + 1))
    dist.all_to_all_single(output, mine, [me() + 1] * size(), [1, 2])
    return output.tolist()


@returns([["zero", "one", "two"], None, None])
def objects() -> object:
    """Objects of different sizes: torch agrees on the sizes first."""
    words = ["zero", "one", "two"]
    gathered: list[object] | None = [None] * size() if me() == 0 else None
    dist.gather_object(words[me()], gathered)
    return gathered


@returns([7, 7, 7])
def key_set_late() -> object:
    """Ranks wait for a key that rank 0 sets after a while."""
    store = _get_default_store()
    if me() == 0:
        time.sleep(1)
        store.set("answer", "7")
    return int(store.get("answer"))


@returns([2, 2])
def monitored_barrier() -> object:
    """A monitored barrier that everybody reaches, somebody late."""
    time.sleep(me())
    dist.monitored_barrier()
    return size()


@returns([1])
def alone() -> object:
    """With one rank there is nobody to wait for."""
    dist.barrier()
    return reduced(1)
