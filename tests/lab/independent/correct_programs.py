"""Odd but correct programs: each returns something deterministic, equal on sim and gloo."""
import contextlib, io, os, queue, random, signal, sys, tempfile, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from registry import correct

COUNTER = 0
CACHE = {}


# ---------------------------------------------------------------- dtypes, ops, shapes
@correct()
def all_dtypes_all_reduce():
    """SUM of every dtype that gloo takes."""
    out = {}
    for d in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        t = torch.full((3,), dist.get_rank() + 1).to(d)
        dist.all_reduce(t)
        out[str(d)] = t.tolist()
    return out


@correct()
def dtypes_tried():
    """Which dtypes all_reduce takes (class of error or values)."""
    out = {}
    for d in (torch.bool, torch.int16, torch.complex64, torch.complex128, torch.uint16, torch.uint32):
        t = torch.ones(2).to(d)
        try:
            dist.all_reduce(t)
            out[str(d)] = str(t.tolist())
        except Exception as e:
            out[str(d)] = "refused"
    return out


@correct()
def broadcast_dtypes():
    """broadcast of bool, int16 and complex: class of error or values."""
    out = {}
    for d in (torch.bool, torch.int16, torch.complex64, torch.float16, torch.bfloat16, torch.uint8):
        t = torch.full((2,), 1 if dist.get_rank() == 0 else 0).to(d)
        try:
            dist.broadcast(t, 0)
            out[str(d)] = str(t.tolist())
        except Exception:
            out[str(d)] = "refused"
    return out


@correct()
def all_ops_int():
    """Every reduction of int64."""
    out = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        t = torch.tensor([dist.get_rank() + 1, 7 - dist.get_rank()])
        dist.all_reduce(t, op=op)
        out.append(t.tolist())
    return out


@correct()
def product_and_max_half():
    """PRODUCT, MIN and MAX in float16 and bfloat16."""
    out = []
    for d in (torch.float16, torch.bfloat16):
        for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            t = torch.tensor([dist.get_rank() + 0.5, 2.0], dtype=d)
            dist.all_reduce(t, op=op)
            out.append(t.tolist())
    return out


@correct()
def avg_on_gloo_now():
    """ReduceOp.AVG on gloo (torch 2.13 takes it)."""
    t = torch.ones(2) * dist.get_rank()
    dist.all_reduce(t, op=dist.ReduceOp.AVG)
    return t.tolist()


@correct()
def avg_of_ints():
    """AVG of integers: value or refusal."""
    t = torch.tensor([dist.get_rank(), 1])
    try:
        dist.all_reduce(t, op=dist.ReduceOp.AVG)
        return t.tolist()
    except Exception as e:
        return "refused"


@correct()
def zero_dim():
    """0-dim tensors in all_reduce, broadcast, send/recv and all_gather."""
    r = dist.get_rank()
    a = torch.tensor(float(r)); dist.all_reduce(a)
    b = torch.tensor(r * 5); dist.broadcast(b, 3)
    out = [torch.tensor(0.0) for _ in range(4)]
    dist.all_gather(out, torch.tensor(float(r)))
    c = torch.tensor(0)
    w = dist.isend(torch.tensor(r), (r + 1) % 4); dist.recv(c, (r - 1) % 4); w.wait()
    return a.item(), b.item(), [o.item() for o in out], c.item()


@correct()
def zero_dim_into_tensor():
    """all_gather_into_tensor of 0-dim inputs: value or refusal as on gloo."""
    out = torch.zeros(4)
    try:
        dist.all_gather_into_tensor(out, torch.tensor(float(dist.get_rank())))
        return out.tolist()
    except Exception:
        return "refused"


@correct()
def empty_tensors():
    """Empty tensors in several calls."""
    e = torch.empty(0)
    dist.all_reduce(e)
    dist.broadcast(e, 0)
    out = [torch.empty(0) for _ in range(4)]
    dist.all_gather(out, torch.empty(0))
    return [list(o.shape) for o in out], list(e.shape)


@correct(n=2)
def empty_send():
    """An empty message is a message."""
    if dist.get_rank() == 0:
        dist.send(torch.empty(0), 1)
        return "sent"
    t = torch.empty(0)
    return dist.recv(t, 0)


@correct()
def uneven_all_gather():
    """all_gather of uneven tensors: as gloo says (value or class of error)."""
    r = dist.get_rank()
    outs = [torch.zeros(i + 1) for i in range(4)]
    try:
        dist.all_gather(outs, torch.full((r + 1,), float(r)))
        return [o.tolist() for o in outs]
    except Exception as e:
        return "refused"


@correct()
def reduce_scatter_list():
    """reduce_scatter with an even list."""
    r = dist.get_rank()
    out = torch.zeros(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r * 10 + i)) for i in range(4)])
    return out.tolist()


@correct()
def reduce_scatter_uneven_list():
    """reduce_scatter with uneven list: as gloo does."""
    r = dist.get_rank()
    out = torch.zeros(r + 1)
    try:
        dist.reduce_scatter(out, [torch.full((i + 1,), float(r * 10 + i)) for i in range(4)])
        return out.tolist()
    except Exception:
        return "refused"


@correct()
def reduce_scatter_max():
    """reduce_scatter_tensor with MAX."""
    r = dist.get_rank()
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, torch.arange(8.0) * (1 if r % 2 else -1), op=dist.ReduceOp.MAX)
    return out.tolist()


@correct()
def all_to_all_uneven():
    """all_to_all_single with triangular splits, some zero."""
    r = dist.get_rank()
    ins = [d for d in range(4)]
    outs = [r] * 4
    x = torch.arange(float(sum(ins))) + 10 * r
    y = torch.empty(sum(outs))
    dist.all_to_all_single(y, x, outs, ins)
    return y.tolist()


@correct()
def all_to_all_list():
    """all_to_all of lists: as gloo does."""
    r = dist.get_rank()
    try:
        out = [torch.zeros(1) for _ in range(4)]
        dist.all_to_all(out, [torch.tensor([r * 10.0 + i]) for i in range(4)])
        return [o.item() for o in out]
    except Exception:
        return "refused"


@correct()
def all_to_all_2d_rows():
    """all_to_all_single of rows of a matrix."""
    r = dist.get_rank()
    x = (torch.arange(12.0) + 100 * r).view(4, 3)
    y = torch.empty(4, 3)
    dist.all_to_all_single(y, x)
    return y.tolist()


@correct()
def non_contiguous_all_reduce():
    """all_reduce of a transposed matrix: value or refusal as on gloo."""
    t = torch.arange(6.0).view(2, 3).t() * (dist.get_rank() + 1)
    t = t.clone().t().contiguous().t()
    try:
        dist.all_reduce(t)
        return t.tolist()
    except Exception:
        return "refused"


@correct()
def slice_of_flat_buffer():
    """all_reduce of contiguous slices of one flat buffer, asynchronously and waited in reverse."""
    flat = torch.arange(12.0) + dist.get_rank()
    ws = [dist.all_reduce(flat[i:i + 3], async_op=True) for i in range(0, 12, 3)]
    for w in reversed(ws):
        w.wait()
    return flat.tolist()


@correct()
def shape_differs_same_numel():
    """Same number of elements in other shapes: gloo counts elements only."""
    t = torch.arange(6.0).view(*[(6,), (2, 3), (3, 2), (1, 6)][dist.get_rank()])
    dist.all_reduce(t)
    return t.flatten().tolist()


@correct(n=2)
def p2p_shape_differs_same_numel():
    """Send (2,3), receive into (6,)."""
    if dist.get_rank() == 0:
        dist.send(torch.arange(6.0).view(2, 3), 1)
        return None
    t = torch.zeros(6)
    dist.recv(t, 0)
    return t.tolist()


@correct()
def requires_grad_all_reduce():
    """all_reduce of a leaf that requires grad, in no_grad and of .data."""
    p = nn.Parameter(torch.ones(2) * dist.get_rank())
    dist.all_reduce(p.data)
    with torch.no_grad():
        dist.all_reduce(p)
    return p.tolist()


@correct()
def memory_format_channels_last():
    """Broadcast of a dense channels_last tensor: value or refusal as on gloo."""
    t = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last) * (1 if dist.get_rank() == 0 else 0)
    try:
        dist.broadcast(t, 0)
        return t.tolist()
    except Exception:
        return "refused"


@correct()
def gather_to_last():
    """gather with dst = last rank; only it passes a list."""
    r = dist.get_rank()
    out = [torch.zeros(2) for _ in range(4)] if r == 3 else None
    dist.gather(torch.full((2,), float(r)), out, dst=3)
    return [o.tolist() for o in out] if out else None


@correct()
def scatter_async():
    """scatter with async_op from rank 2."""
    out = torch.zeros(2)
    w = dist.scatter(out, [torch.full((2,), float(i)) for i in range(4)] if dist.get_rank() == 2 else None, src=2, async_op=True)
    w.wait()
    return out.tolist()


@correct()
def reduce_then_look_at_root():
    """reduce to 1: the root's value only."""
    t = torch.ones(3) * dist.get_rank()
    dist.reduce(t, 1)
    return t.tolist() if dist.get_rank() == 1 else None


@correct()
def coalesced_all_reduce():
    """all_reduce_coalesced of two shapes."""
    ts = [torch.ones(2) * dist.get_rank(), torch.ones(3)]
    dist.all_reduce_coalesced(ts)
    return [t.tolist() for t in ts]


@correct()
def coalescing_manager_sync():
    """_coalescing_manager around all_reduces: value or refusal as on gloo."""
    ts = [torch.ones(i + 1) * dist.get_rank() for i in range(3)]
    try:
        with dist.distributed_c10d._coalescing_manager():
            for t in ts:
                dist.all_reduce(t)
        return [t.tolist() for t in ts]
    except Exception as e:
        return "refused"


@correct()
def coalescing_manager_async():
    """_coalescing_manager(async_ops=True), wait at the end: as on gloo."""
    ts = [torch.ones(2) * dist.get_rank() for i in range(2)]
    try:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as cm:
            for t in ts:
                dist.all_reduce(t)
        cm.wait()
        return [t.tolist() for t in ts]
    except Exception as e:
        return "refused"


@correct()
def all_gather_coalesced_call():
    """all_gather_coalesced."""
    r = dist.get_rank()
    outs = [[torch.zeros(2), torch.zeros(1)] for _ in range(4)]
    dist.all_gather_coalesced(outs, [torch.full((2,), float(r)), torch.tensor([r + 0.5])])
    return [[t.tolist() for t in o] for o in outs]


@correct()
def premul_sum_try():
    """_make_nccl_premul_sum is refused on gloo."""
    try:
        t = torch.ones(1)
        dist.all_reduce(t, op=dist._make_nccl_premul_sum(2.0))
        return t.item()
    except Exception:
        return "refused"


# ---------------------------------------------------------------- p2p
@correct()
def recv_returns_source():
    """recv returns the source's rank; any-source from distinct values."""
    if dist.get_rank() == 0:
        got = []
        for _ in range(3):
            t = torch.zeros(1, dtype=torch.int64)
            src = dist.recv(t)
            got.append((src, t.item()))
        return sorted(got)
    dist.send(torch.tensor([dist.get_rank() * 11]), 0)


@correct()
def irecv_any_source():
    """irecv without a source, three posted at once."""
    if dist.get_rank() == 0:
        ts = [torch.zeros(1) for _ in range(3)]
        ws = [dist.irecv(t) for t in ts]
        [w.wait() for w in ws]
        return sorted(t.item() for t in ts), sorted(w._source_rank() for w in ws)
    dist.isend(torch.tensor([float(dist.get_rank())]), 0).wait()


@correct(n=2)
def tags_crossing_async():
    """Tags received in the other order with isend/irecv."""
    a, b = torch.zeros(1), torch.zeros(1)
    if dist.get_rank() == 0:
        ws = [dist.isend(torch.tensor([1.0]), 1, tag=1), dist.isend(torch.tensor([2.0]), 1, tag=2)]
    else:
        ws = [dist.irecv(b, 0, tag=2), dist.irecv(a, 0, tag=1)]
    [w.wait() for w in ws]
    return a.item(), b.item()


@correct(n=2)
def tags_large():
    """Large tag values."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.tensor([3.0]), 1, tag=2**30)
    else:
        dist.recv(t, 0, tag=2**30)
    return t.item()


@correct(n=2)
def same_tag_fifo():
    """Messages with one tag keep their order."""
    if dist.get_rank() == 0:
        [dist.send(torch.tensor([float(i)]), 1) for i in range(5)]
        return None
    out = []
    for _ in range(5):
        t = torch.zeros(1)
        dist.recv(t, 0)
        out.append(t.item())
    return out


@correct(n=2)
def isends_then_reverse_wait():
    """Many isends waited in the reverse order."""
    r = dist.get_rank()
    outs = [torch.zeros(2) for _ in range(6)]
    rs = [dist.irecv(o, 1 - r) for o in outs]
    ss = [dist.isend(torch.full((2,), float(i)), 1 - r) for i in range(6)]
    [w.wait() for w in reversed(ss + rs)]
    return [o.tolist() for o in outs]


@correct()
def batch_ring():
    """Ring with batch_isend_irecv."""
    r = dist.get_rank()
    t = torch.zeros(1)
    ops = [dist.P2POp(dist.isend, torch.tensor([float(r)]), (r + 1) % 4), dist.P2POp(dist.irecv, t, (r - 1) % 4)]
    [w.wait() for w in dist.batch_isend_irecv(ops)]
    return t.item()


@correct()
def batch_only_some_ranks():
    """Borders: rank 0 and 3 have one op, the middle has two."""
    r, ops, l, rr = dist.get_rank(), [], torch.zeros(1), torch.zeros(1)
    if r > 0:
        ops += [dist.P2POp(dist.irecv, l, r - 1), dist.P2POp(dist.isend, torch.tensor([1.0 * r]), r - 1)]
    if r < 3:
        ops += [dist.P2POp(dist.isend, torch.tensor([1.0 * r]), r + 1), dist.P2POp(dist.irecv, rr, r + 1)]
    [w.wait() for w in dist.batch_isend_irecv(ops)]
    return l.item(), rr.item()


@correct(n=2)
def batch_with_group_peer():
    """P2POp with group_peer and tag."""
    g = dist.new_group([0, 1])
    r, t = dist.get_rank(), torch.zeros(1)
    ops = [dist.P2POp(dist.isend, torch.tensor([r + 1.0]), group=g, tag=3, group_peer=1 - r), dist.P2POp(dist.irecv, t, group=g, tag=3, group_peer=1 - r)]
    [w.wait() for w in dist.batch_isend_irecv(ops)]
    return t.item()


@correct()
def group_src_dst():
    """group_src/group_dst in a subgroup [1,3]."""
    g = dist.new_group([1, 3])
    t = torch.full((1,), float(dist.get_rank()))
    if dist.get_rank() in (1, 3):
        dist.broadcast(t, group=g, group_src=1)
        if dist.get_rank() == 1:
            dist.send(t + 1, group=g, group_dst=1)
        else:
            dist.recv(t, group=g, group_src=0)
    return t.item()


@correct(n=2)
def poll_until_completed():
    """Polls an async all_reduce with sleeps until it is completed, then waits."""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        time.sleep(0.1)
    w = dist.all_reduce(t, async_op=True)
    while not w.is_completed():
        time.sleep(0.005)
    w.wait()
    return t.item()


@correct(n=2)
def poll_busy_until_completed():
    """Busy polling without sleep."""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        time.sleep(0.05)
    w = dist.all_reduce(t, async_op=True)
    while not w.is_completed():
        pass
    return t.item()


@correct(n=2)
def poll_and_compute():
    """Does work until the message is there."""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        x = torch.ones(64, 64)
        for _ in range(20):
            x = (x @ x) / 64
    w = dist.all_reduce(t, async_op=True)
    n = 0
    while not w.is_completed():
        n += 1
        torch.ones(32, 32) @ torch.ones(32, 32)
    w.wait()
    return t.item()


@correct(n=2)
def send_many_sizes():
    """Header with shape and dtype, then the payload."""
    if dist.get_rank() == 0:
        for shape in [(2, 3), (), (0, 4), (5,)]:
            dist.send(torch.tensor([len(shape)]), 1)
            if shape:
                dist.send(torch.tensor(shape), 1)
            dist.send(torch.ones(shape), 1)
        return None
    out = []
    for _ in range(4):
        n = torch.zeros(1, dtype=torch.int64); dist.recv(n, 0)
        s = torch.zeros(int(n), dtype=torch.int64)
        if n:
            dist.recv(s, 0)
        x = torch.zeros(s.tolist()); dist.recv(x, 0)
        out.append((list(x.shape), x.sum().item()))
    return out


# ---------------------------------------------------------------- groups
@correct()
def single_member_group():
    """A group of one rank per rank."""
    gs = [dist.new_group([i]) for i in range(4)]
    t = torch.full((1,), float(dist.get_rank()))
    g = gs[dist.get_rank()]
    dist.all_reduce(t, group=g)
    dist.barrier(group=g)
    return t.item(), dist.get_rank(g), dist.get_world_size(g)


@correct()
def reversed_group_ranks():
    """new_group([3,1]): group ranks as torch sorts or not."""
    g = dist.new_group([3, 1])
    out = [torch.zeros(1) for _ in range(2)]
    if dist.get_rank() in (1, 3):
        dist.all_gather(out, torch.tensor([float(dist.get_rank())]), group=g)
        return [o.item() for o in out], dist.get_rank(g), dist.get_process_group_ranks(g), dist.get_global_rank(g, 0)
    return dist.get_rank(g)


@correct()
def local_sync_group():
    """use_local_synchronization: only the members call new_group."""
    r = dist.get_rank()
    g = dist.new_group([0, 1] if r < 2 else [2, 3], use_local_synchronization=True)
    t = torch.tensor([float(r)])
    dist.all_reduce(t, group=g)
    return t.item()


@correct()
def non_member_warns_and_goes_on():
    """A non-member's all_reduce is a warning and no call."""
    g = dist.new_group([0, 1])
    t = torch.ones(1) * dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(t, group=g)
    return t.item(), len(caught)


@correct()
def overlapping_groups():
    """Overlapping groups in a consistent order."""
    gs = [dist.new_group(x) for x in ([0, 1, 2], [1, 2, 3], [0, 3])]
    r, out = dist.get_rank(), []
    for g, m in zip(gs, ([0, 1, 2], [1, 2, 3], [0, 3])):
        if r in m:
            t = torch.tensor([float(r)])
            dist.all_reduce(t, group=g)
            out.append(t.item())
    return out


@correct()
def new_subgroups_pairs():
    """new_subgroups(2) and by enumeration."""
    a, _ = dist.new_subgroups(2)
    b, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    t, u = torch.tensor([float(dist.get_rank())]), torch.tensor([float(dist.get_rank())])
    dist.all_reduce(t, group=a)
    dist.all_reduce(u, group=b)
    return t.item(), u.item()


@correct()
def split_group_try():
    """split_group: value or refusal as on gloo."""
    try:
        g = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        t = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(t, group=g)
        return t.item()
    except Exception as e:
        return "refused"


@correct()
def destroy_subgroup_then_world():
    """Destroys a subgroup and goes on in the world."""
    g = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(1), group=g)
    dist.destroy_process_group(g)
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


@correct()
def use_of_destroyed_group():
    """all_reduce on a destroyed group: value or refusal as on gloo."""
    g = dist.new_group([0, 1, 2, 3])
    dist.destroy_process_group(g)
    t = torch.ones(1)
    try:
        dist.all_reduce(t, group=g)
        return t.item()
    except Exception as e:
        return "refused"


@correct()
def destroy_world_and_compute():
    """Destroys the world at the end; is_initialized is False."""
    dist.barrier()
    dist.destroy_process_group()
    return dist.is_initialized(), dist.is_available()


@correct(n=2)
def introspection():
    """Names and numbers of the world."""
    g = dist.new_group([0, 1], backend="gloo", group_desc="mine")
    return dist.get_backend(), dist.get_backend(g), g.group_desc, dist.get_node_local_rank(), dist.is_gloo_available(), dist.get_process_group_ranks(dist.group.WORLD), g.size(), g.rank()


@correct()
def members_only_group_many():
    """Twelve groups alternately used."""
    gs = [dist.new_group([i % 4, (i + 1) % 4]) for i in range(12)]
    s = 0.0
    for i, g in enumerate(gs):
        if dist.get_rank() in (i % 4, (i + 1) % 4):
            t = torch.tensor([float(i)])
            dist.all_reduce(t, group=g)
            s += t.item()
    return s


@correct(n=2)
def monitored_barrier_ok():
    """monitored_barrier passes."""
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)
    return "ok"


@correct()
def barrier_async_and_device():
    """Asynchronous barriers."""
    w = dist.barrier(async_op=True)
    w.wait()
    return w.is_completed()


# ---------------------------------------------------------------- objects and stores
@correct()
def objects_all():
    """All object collectives."""
    r = dist.get_rank()
    a = [None] * 4
    dist.all_gather_object(a, {"r": r, "t": (r,) * r})
    b = [{"lr": 0.1}, "x", None] if r == 0 else [None] * 3
    dist.broadcast_object_list(b, 0)
    c = [None]
    dist.scatter_object_list(c, [f"s{i}" for i in range(4)] if r == 1 else None, src=1)
    d = [None] * 4 if r == 2 else None
    dist.gather_object([r], d, dst=2)
    return a, b, c, d


@correct(n=2)
def objects_send_recv():
    """send_object_list / recv_object_list."""
    if dist.get_rank() == 0:
        dist.send_object_list([1, "two", {"three": torch.ones(2)}], 1)
        return None
    o = [None] * 3
    src = dist.recv_object_list(o, 0)
    return src, o[0], o[1], o[2]["three"].tolist()


@correct()
def objects_with_tensors_and_none():
    """Gathers tensors, None, exceptions as objects."""
    o = [None] * 4
    dist.all_gather_object(o, [torch.arange(dist.get_rank()), None, ValueError("x")])
    return [[x[0].tolist(), x[1], repr(x[2])] for x in o]


@correct()
def object_in_group():
    """all_gather_object and broadcast_object_list in subgroups at once."""
    gs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    r = dist.get_rank()
    o = [None] * 2
    dist.all_gather_object(o, r, group=gs[r % 2])
    b = [r] if r < 2 else [None]
    dist.broadcast_object_list(b, src=r % 2, group=gs[r % 2])
    return o, b


@correct(n=3)
def store_all_calls():
    """set, get, add, check, compare_set, delete_key, num_keys-like things."""
    s = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
    r = dist.get_rank()
    if r == 0:
        s.set("a", "1")
        s.set("b", b"\x00bytes")
    s.wait(["a", "b"])
    n = s.add("n", r + 1)
    dist.barrier()
    total = s.add("n", 0)
    cas = s.compare_set("c", "", f"first") if r == 0 else None
    dist.barrier()
    out = s.get("a").decode(), s.get("b"), total, s.check(["a"]), s.check(["zz"]), s.get("c").decode()
    dist.barrier()
    if r == 0:
        out += (s.delete_key("a"), s.check(["a"]))
    return str(out), type(n).__name__


@correct(n=2)
def store_multi():
    """multi_set / multi_get / append where available."""
    s = dist.PrefixStore("m", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        s.multi_set(["x", "y"], ["1", "2"])
        s.append("z", "a")
        s.append("z", "b")
        s.set("done", "1")
    s.wait(["done"])
    return [v.decode() for v in s.multi_get(["x", "y"])], s.get("z").decode()


@correct(n=2)
def store_heartbeat():
    """A heartbeat thread writes to the store; the other rank watches it beat."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        stop = threading.Event()
        def beat():
            while not stop.is_set():
                s.add("beat", 1)
                time.sleep(0.01)
        th = threading.Thread(target=beat, daemon=True)
        th.start()
        s.wait(["seen"])
        stop.set()
        th.join()
        return "beaten"
    while s.add("beat", 0) < 3:
        time.sleep(0.01)
    s.set("seen", "1")
    return "seen"


@correct(n=2)
def store_check_poll():
    """Polls store.check until a late key is there."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        time.sleep(0.2)
        s.set("late", "7")
        return "set"
    while not s.check(["late"]):
        time.sleep(0.01)
    return s.get("late").decode()


@correct(n=2)
def store_check_poll_busy():
    """The same, busy."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        time.sleep(0.1)
        s.set("late", "7")
        return "set"
    while not s.check(["late"]):
        pass
    return s.get("late").decode()


@correct(n=2)
def store_barrier_by_hand():
    """A barrier from add and wait, three rounds."""
    s, out = dist.distributed_c10d._get_default_store(), []
    for i in range(3):
        if s.add(f"round-{i}", 1) == 2:
            s.set(f"go-{i}", str(i))
        out.append(s.get(f"go-{i}").decode())
    return out


@correct(n=2)
def store_timeout_handled():
    """store.wait with 0.3 s expires and is handled; then the key comes."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        time.sleep(3)
        s.set("k", "v")
        return "set"
    tries = 0
    try:
        s.wait(["k"], timedelta(seconds=1))
    except RuntimeError:
        tries += 1
    s.wait(["k"])
    return tries, s.get("k").decode()


@correct(n=2)
def store_timeout_retry_loop():
    """Retries store.wait with a short limit until the key comes; at least one retry."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        time.sleep(3.5)
        s.set("k", "v")
        return "set"
    tries = 0
    while True:
        try:
            s.wait(["k"], timedelta(seconds=1))
            return tries > 0
        except RuntimeError:
            tries += 1


@correct(n=2)
def own_tcp_store():
    """A TCPStore of one's own, its port told through the default store."""
    base = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        s = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        base.set("port", str(s.port))
    else:
        s = dist.TCPStore("127.0.0.1", int(base.get("port")), 2, False)
    s.set(f"r{dist.get_rank()}", "x")
    s.wait(["r0", "r1"])
    dist.barrier()
    return s.get("r1").decode()


@correct(n=2)
def own_hash_and_file_store():
    """HashStore within a rank and FileStore between ranks."""
    h = dist.HashStore()
    h.set("a", "b")
    path = [tempfile.mktemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(path, 0)
    f = dist.FileStore(path[0], 2)
    f.set(f"k{dist.get_rank()}", str(dist.get_rank()))
    out = f.get(f"k{1 - dist.get_rank()}").decode()
    dist.barrier()
    return h.get("a").decode(), out


# ---------------------------------------------------------------- threads
@correct(n=2)
def threads_own_groups():
    """Two threads of a rank, each with its own group, any order."""
    gs = [dist.new_group([0, 1]) for _ in range(2)]
    out = [None, None]
    def work(i):
        t = torch.zeros(1)
        for k in range(3):
            t += i + k
            dist.all_reduce(t, group=gs[i])
        out[i] = t.item()
    ths = [threading.Thread(target=work, args=(i,)) for i in ((0, 1) if dist.get_rank() else (1, 0))]
    [t.start() for t in ths]
    [t.join() for t in ths]
    return out


@correct(n=2)
def thread_heartbeat_group():
    """Heartbeat thread with all_reduce of a stop flag on its own group, main trains in the world."""
    g = dist.new_group([0, 1])
    stop, beats = threading.Event(), []
    def beat():
        while True:
            f = torch.tensor([1.0 if stop.is_set() else 0.0])
            dist.all_reduce(f, group=g)
            beats.append(1)
            if f.item() == 2.0:
                break
            time.sleep(0.01)
    th = threading.Thread(target=beat)
    th.start()
    t = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(t)
    stop.set()
    th.join()
    return t.item(), len(beats) > 0


@correct()
def thread_server():
    """Rank 0: a thread per client, two requests each."""
    r = dist.get_rank()
    if r == 0:
        seen = {}
        def serve(c):
            for _ in range(2):
                t = torch.zeros(1)
                dist.recv(t, c)
                seen[c] = seen.get(c, 0) + t.item()
                dist.send(t * 2, c)
        ths = [threading.Thread(target=serve, args=(c,)) for c in (1, 2, 3)]
        [t.start() for t in ths]
        [t.join() for t in ths]
        return sorted(seen.items())
    out = []
    for k in range(2):
        t = torch.tensor([float(r + k)])
        dist.send(t, 0)
        dist.recv(t, 0)
        out.append(t.item())
    return out


@correct()
def main_server_queue_workers():
    """Receiver threads put into a queue, main applies updates."""
    if dist.get_rank() == 0:
        q = queue.Queue()
        def rx(c):
            t = torch.zeros(1)
            dist.recv(t, c)
            q.put((c, t.item()))
        ths = [threading.Thread(target=rx, args=(c,), daemon=True) for c in (1, 2, 3)]
        [t.start() for t in ths]
        return sorted(q.get() for _ in range(3))
    time.sleep(0.01 * dist.get_rank())
    dist.send(torch.tensor([float(dist.get_rank())]), 0)


@correct(n=2)
def prefetch_queue():
    """A bounded prefetch queue with a sentinel, and an all-reduce per batch."""
    q = queue.Queue(maxsize=2)
    def load():
        for i in range(5):
            time.sleep(0.001)
            q.put(torch.tensor([float(i)]))
        q.put(None)
    threading.Thread(target=load, daemon=True).start()
    s = 0.0
    while (x := q.get()) is not None:
        dist.all_reduce(x)
        s += x.item()
    return s


@correct(n=2)
def pool_save():
    """Asynchronous saves in a ThreadPoolExecutor, awaited at the end."""
    folder = tempfile.mkdtemp()
    with ThreadPoolExecutor(2) as pool:
        fs = []
        for step in range(3):
            t = torch.tensor([float(step)])
            dist.all_reduce(t)
            fs.append(pool.submit(torch.save, t.clone(), os.path.join(folder, f"{step}.pt")))
    [f.result() for f in fs]
    return [torch.load(os.path.join(folder, f"{s}.pt")).item() for s in range(3)]


@correct(n=2)
def pool_collective():
    """A collective in a pool's thread while main does p2p."""
    g = dist.new_group([0, 1])
    r = dist.get_rank()
    with ThreadPoolExecutor(1) as pool:
        f = pool.submit(lambda: (lambda t: (dist.all_reduce(t, group=g), t.item())[1])(torch.ones(1)))
        t = torch.zeros(1)
        w = dist.isend(torch.tensor([r + 1.0]), 1 - r)
        dist.recv(t, 1 - r)
        w.wait()
        return f.result(), t.item()


@correct(n=2)
def thread_daemon_left_behind():
    """A daemon thread that sleeps for ever is left behind."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


@correct(n=2)
def thread_daemon_waits_on_queue():
    """A daemon worker waits for jobs for ever; main ends."""
    q, done = queue.Queue(), queue.Queue()
    def work():
        while True:
            done.put(q.get() * 2)
    threading.Thread(target=work, daemon=True).start()
    q.put(dist.get_rank())
    x = done.get()
    dist.barrier()
    return x


@correct(n=2)
def thread_timer():
    """threading.Timer sends after a while; cancelled timer doesn't."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        tm = threading.Timer(0.05, lambda: dist.send(torch.ones(1), 1))
        never = threading.Timer(100, lambda: dist.send(torch.ones(1), 1))
        never.start(); tm.start()
        never.cancel(); tm.join(); never.join()
        return "ok"
    dist.recv(t, 0)
    return t.item()


@correct(n=2)
def thread_condition_pingpong():
    """Two threads alternate with a condition; results are reduced."""
    c, turn, log = threading.Condition(), [0], []
    def f(i):
        for _ in range(3):
            with c:
                c.wait_for(lambda: turn[0] == i)
                log.append(i)
                turn[0] = 1 - i
                c.notify_all()
    ths = [threading.Thread(target=f, args=(i,)) for i in (0, 1)]
    [t.start() for t in ths]
    [t.join() for t in ths]
    dist.barrier()
    return log


@correct(n=2)
def thread_event_timeout():
    """Event.wait(timeout) returns False, then True."""
    ev = threading.Event()
    a = ev.wait(timeout=0.05)
    threading.Timer(0.02, ev.set).start()
    b = ev.wait(timeout=30)
    dist.barrier()
    return a, b


@correct(n=2)
def thread_locals():
    """threading.local and current_thread names."""
    loc = threading.local()
    loc.x = dist.get_rank()
    out = []
    def f():
        out.append(hasattr(loc, "x"))
        out.append(dist.get_rank())
        out.append(threading.current_thread().name)
    th = threading.Thread(target=f, name="mine")
    th.start(); th.join()
    return loc.x, out, threading.current_thread() is threading.main_thread()


@correct(n=2)
def thread_exception_propagated():
    """A thread's error is kept and raised by main, then handled."""
    box = []
    def f():
        try:
            raise KeyError("k")
        except KeyError as e:
            box.append(e)
    th = threading.Thread(target=f)
    th.start(); th.join()
    dist.barrier()
    return repr(box[0])


@correct(n=2)
def thread_excepthook():
    """threading.excepthook sees the thread's error and the program goes on."""
    seen = []
    old = threading.excepthook
    threading.excepthook = lambda a: seen.append(a.exc_type.__name__)
    try:
        th = threading.Thread(target=lambda: 1 / 0)
        th.start(); th.join()
    finally:
        threading.excepthook = old
    dist.barrier()
    return seen


@correct(n=2)
def thread_async_work_waited_elsewhere():
    """A handle made in main is waited for in a thread."""
    t = torch.ones(2)
    w = dist.all_reduce(t, async_op=True)
    th = threading.Thread(target=w.wait)
    th.start(); th.join()
    return t.tolist()


@correct(n=2)
def thread_future_callback():
    """get_future().then on an all-reduce."""
    t = torch.ones(2) * (dist.get_rank() + 1)
    f = dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    return f.wait().tolist()


@correct(n=2)
def pool_map_order():
    """pool.map over group calls with one worker keeps the order."""
    g = dist.new_group([0, 1])
    def f(i):
        t = torch.tensor([float(i)])
        dist.all_reduce(t, group=g)
        return t.item()
    with ThreadPoolExecutor(1) as p:
        return list(p.map(f, range(4)))


@correct(n=2)
def asyncio_program():
    """asyncio with to_thread around collectives."""
    import asyncio
    async def main():
        t = torch.ones(1)
        await asyncio.to_thread(dist.all_reduce, t)
        await asyncio.sleep(0.01)
        return t.item()
    return asyncio.run(main())


@correct(n=2)
def queue_join_task_done():
    """queue.join with task_done, LifoQueue and PriorityQueue."""
    q, pq, out = queue.Queue(), queue.PriorityQueue(), []
    def w():
        while True:
            out.append(q.get()); q.task_done()
    threading.Thread(target=w, daemon=True).start()
    [q.put(i) for i in range(3)]
    q.join()
    [pq.put(x) for x in (3, 1, 2)]
    dist.barrier()
    return out, [pq.get() for _ in range(3)]


@correct(n=2)
def wait_timeout_handled():
    """A work.wait(0.5 s) on a group of its own expires, is handled, world goes on."""
    g = dist.new_group([0, 1])
    out = "nothing"
    if dist.get_rank() == 1:
        try:
            dist.irecv(torch.zeros(1), 0, group=g).wait(timedelta(seconds=0.5))
        except RuntimeError:
            out = "expired"
    t = torch.ones(1)
    dist.all_reduce(t)
    return out, t.item()


@correct(n=2)
def wait_with_ample_timeout():
    """work.wait(timedelta) that suffices."""
    t = torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    ok = dist.all_reduce(t, async_op=True).wait(timedelta(seconds=20))
    return ok, t.item()


@correct(n=2)
def monitored_barrier_caught():
    """monitored_barrier with a late rank on a group of its own: rank 0 raises."""
    g = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return "late"
    try:
        dist.monitored_barrier(group=g, timeout=timedelta(seconds=0.5))
        return "passed"
    except RuntimeError:
        return "noticed"


@correct(n=2)
def lock_with_timeout():
    """lock.acquire(timeout) fails while a thread holds it, then succeeds."""
    lock, go = threading.Lock(), threading.Event()
    def hold():
        with lock:
            go.set()
            time.sleep(0.3)
    th = threading.Thread(target=hold)
    th.start(); go.wait()
    a = lock.acquire(timeout=0.05)
    th.join()
    b = lock.acquire(timeout=1)
    dist.barrier()
    return a, b


@correct(n=2)
def join_with_timeout():
    """th.join(timeout) returns while the thread still waits for a message."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        time.sleep(0.5)
        dist.send(torch.ones(1), 1)
        return None
    th = threading.Thread(target=dist.recv, args=(t, 0))
    th.start()
    th.join(timeout=0.05)
    alive = th.is_alive()
    th.join()
    return alive, t.item()


@correct(n=2)
def watchdog_thread():
    """A watchdog checks main's progress stamp every 20 ms and never barks."""
    stamp, bark, stop = [time.monotonic()], [], threading.Event()
    def dog():
        while not stop.wait(0.02):
            if time.monotonic() - stamp[0] > 10:
                bark.append(1)
    th = threading.Thread(target=dog, daemon=True)
    th.start()
    t = torch.ones(1)
    for _ in range(5):
        time.sleep(0.01)
        dist.all_reduce(t)
        stamp[0] = time.monotonic()
    stop.set(); th.join()
    return t.item(), bark


# ---------------------------------------------------------------- DDP
def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@correct()
def ddp_train():
    """DDP and SGD with per-rank data."""
    net = DDP(make_net(dist.get_rank()))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.arange(8.0).view(2, 4) * (dist.get_rank() + 1) / 10
    for _ in range(3):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
    return [p.sum().item() for p in net.parameters()]


@correct()
def ddp_no_sync_accumulate():
    """Gradient accumulation with no_sync, same on all."""
    net = DDP(make_net())
    x = torch.ones(2, 4) * dist.get_rank()
    with net.no_sync():
        net(x).sum().backward()
    net(x * 2).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def ddp_join_uneven():
    """join() with uneven inputs."""
    net = DDP(make_net())
    n = 0
    with net.join():
        for i in range(2 + dist.get_rank()):
            net(torch.ones(1, 4) * i).sum().backward()
            n += 1
    return n, [p.grad.sum().item() for p in net.parameters()]


@correct(n=2)
def ddp_join_throw_on_early():
    """join(throw_on_early_termination) raises on all, caught."""
    net = DDP(make_net())
    try:
        with net.join(throw_on_early_termination=True):
            for i in range(2 + dist.get_rank()):
                net(torch.ones(1, 4)).sum().backward()
        return "none"
    except RuntimeError:
        return "raised"


@correct()
def ddp_find_unused():
    """find_unused_parameters with a branch per rank."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.a(x) if dist.get_rank() % 2 else self.b(x)
    net = DDP(Net(), find_unused_parameters=True)
    for _ in range(2):
        net.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def ddp_static_graph():
    """static_graph with a module used twice."""
    net = DDP(make_net(), static_graph=True)
    for _ in range(2):
        net(net(torch.ones(1, 4)).repeat(1, 2)).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def ddp_hooks_builtin():
    """fp16 compress hook and allreduce_hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as dh
    out = []
    for h in (dh.allreduce_hook, dh.fp16_compress_hook):
        net = DDP(make_net())
        net.register_comm_hook(None, h)
        net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
        out.append(round(sum(p.grad.sum().item() for p in net.parameters()), 1))
    return out


@correct()
def ddp_hook_powersgd():
    """PowerSGD hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ps
    net = DDP(make_net())
    net.register_comm_hook(ps.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), ps.powerSGD_hook)
    for _ in range(4):
        net.zero_grad()
        net(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    return round(sum(p.grad.sum().item() for p in net.parameters()), 2)


@correct()
def ddp_hook_own():
    """A comm hook of one's own, that divides twice and uses then()."""
    net = DDP(make_net())
    def hook(state, bucket):
        t = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    net.register_comm_hook(None, hook)
    net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def ddp_small_buckets_view():
    """bucket_cap_mb tiny, gradient_as_bucket_view, broadcast_buffers off."""
    net = DDP(make_net(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True, broadcast_buffers=False)
    for _ in range(2):
        net.zero_grad(set_to_none=False)
        net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def ddp_batchnorm_buffers():
    """BatchNorm buffers are broadcast from rank 0 in each forward."""
    net = DDP(nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)))
    nn.init.ones_(net.module[0].weight)
    for _ in range(2):
        net(torch.arange(8.0).view(4, 2) * (dist.get_rank() + 1)).sum().backward()
    net.eval()
    net(torch.ones(1, 2))
    return net.module[1].num_batches_tracked.item(), net.module[1].running_mean.tolist() if dist.get_rank() == 0 else None


@correct(n=2)
def ddp_checkpointing():
    """DDP with activation checkpointing (non-reentrant)."""
    from torch.utils.checkpoint import checkpoint
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = make_net()
        def forward(self, x):
            return checkpoint(self.n, x, use_reentrant=False)
    net = DDP(Net())
    net(torch.ones(1, 4)).sum().backward()
    return [p.grad.sum().item() for p in net.parameters()]


@correct()
def zero_redundancy_optimizer():
    """ZeroRedundancyOptimizer with DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DDP(make_net())
    opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    for _ in range(2):
        opt.zero_grad()
        net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
        opt.step()
    opt.consolidate_state_dict(0)
    return [p.sum().item() for p in net.parameters()], len(opt.state_dict()["state"]) if dist.get_rank() == 0 else None


@correct()
def distributed_sampler_loader():
    """DistributedSampler with a DataLoader and set_epoch."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    ds = TensorDataset(torch.arange(10))
    s = DistributedSampler(ds, shuffle=True, seed=3)
    out = []
    for e in range(2):
        s.set_epoch(e)
        out.append([b[0].tolist() for b in DataLoader(ds, batch_size=2, sampler=s)])
    return out


@correct(n=2)
def dataloader_workers():
    """A DataLoader with worker processes."""
    from torch.utils.data import DataLoader
    out = [b.tolist() for b in DataLoader(list(range(6)), batch_size=2, num_workers=1)]
    dist.barrier()
    return out


@correct()
def model_averaging():
    """PeriodicModelAverager."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    net = make_net(dist.get_rank())
    a = PeriodicModelAverager(period=2, warmup_steps=0)
    net(torch.ones(1, 4)).sum().backward()
    for _ in range(3):
        a.average_parameters(net.parameters())
    return [p.sum().item() for p in net.parameters()]


# ---------------------------------------------------------------- FSDP2, mesh, DTensor, TP, functional
@correct()
def fsdp2_train():
    """fully_shard per layer and Adam."""
    from torch.distributed.fsdp import fully_shard
    net = make_net()
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    fully_shard(net)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(3):
        opt.zero_grad()
        net(torch.ones(2, 4) * (dist.get_rank() + 1)).pow(2).mean().backward()
        opt.step()
    return [p.full_tensor().sum().item() for p in net.parameters()]


@correct()
def fsdp2_clip_and_state_dict():
    """clip_grad_norm_ of a sharded model and a full state dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    net = make_net()
    fully_shard(net)
    net(torch.ones(2, 4)).sum().backward()
    n = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return n.full_tensor().item(), sorted((k, v.sum().item()) for k, v in sd.items())


@correct()
def fsdp2_mixed_and_hsdp():
    """HSDP on a 2x2 mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    net = make_net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard")))
    net(torch.ones(2, 4) * dist.get_rank()).sum().backward()
    return [p.grad.full_tensor().sum().item() for p in net.parameters()]


@correct()
def fsdp2_no_reshard_accumulate():
    """set_requires_gradient_sync(False) and reshard_after_forward=False."""
    from torch.distributed.fsdp import fully_shard
    net = fully_shard(make_net(), reshard_after_forward=False)
    net.set_requires_gradient_sync(False)
    net(torch.ones(1, 4)).sum().backward()
    net.set_requires_gradient_sync(True)
    net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    return [p.grad.full_tensor().sum().item() for p in net.parameters()]


@correct()
def fsdp1_train():
    """FSDP1 on CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    try:
        net = FSDP(make_net(), device_id=torch.device("cpu"))
        net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
        return [round(net.clip_grad_norm_(1.0).item(), 4)]
    except (RuntimeError, ValueError, AssertionError) as e:
        return "refused"


@correct()
def mesh_2d():
    """A 2x2 mesh: collectives by dimension, coordinates, submesh."""
    from torch.distributed.device_mesh import init_device_mesh
    m = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a, b = torch.tensor([float(dist.get_rank())]), torch.tensor([float(dist.get_rank())])
    dist.all_reduce(a, group=m["dp"].get_group())
    dist.all_reduce(b, group=m.get_group("tp"))
    return a.item(), b.item(), m.get_coordinate(), m["tp"].get_local_rank(), m.mesh.tolist()


@correct()
def mesh_flatten():
    """Flattened mesh dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    m = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    f = m._flatten("all") if hasattr(m, "_flatten") else m
    t = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(t, group=f.get_group())
    return t.item()


@correct()
def mesh_subset():
    """A DeviceMesh of ranks [1,2] only."""
    from torch.distributed.device_mesh import DeviceMesh
    m = DeviceMesh("cpu", [1, 2])
    t = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() in (1, 2):
        dist.all_reduce(t, group=m.get_group())
    return t.item(), m.get_coordinate()


@correct()
def dtensor_redistribute():
    """Shard -> Replicate -> Shard(1) -> Partial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    m = init_device_mesh("cpu", (4,))
    d = distribute_tensor(torch.arange(32.0).view(8, 4), m, [Shard(0)])
    s1 = d.redistribute(placements=[Shard(1)]).to_local()
    p = DTensor.from_local(torch.ones(2), m, [Partial()]).redistribute(placements=[Replicate()]).to_local()
    return d.full_tensor().sum().item(), s1.tolist(), p.tolist(), d.sum().full_tensor().item()


@correct()
def dtensor_uneven():
    """A DTensor with 10 rows over 4 ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    d = distribute_tensor(torch.arange(10.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    return d.to_local().tolist(), d.full_tensor().tolist()


@correct()
def dtensor_matmul_grad():
    """Matmul of DTensors with backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    m = init_device_mesh("cpu", (4,))
    a = distribute_tensor(torch.arange(32.0).view(8, 4), m, [Shard(0)]).requires_grad_()
    b = distribute_tensor(torch.ones(4, 2), m, [Replicate()]).requires_grad_()
    (a @ b).sum().backward()
    return a.grad.full_tensor().sum().item(), b.grad.full_tensor().tolist()


@correct()
def dtensor_random():
    """DTensor rand with a manual seed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros, ones
    m = init_device_mesh("cpu", (4,))
    return ones(8, 2, device_mesh=m, placements=[Shard(0)]).full_tensor().sum().item(), list(zeros(5, device_mesh=m, placements=[Shard(0)]).to_local().shape)


@correct()
def tp_parallelize_module():
    """parallelize_module with Colwise and Rowwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    net = make_net()
    ref = net(torch.ones(1, 4)).tolist()
    parallelize_module(net, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y = net(torch.ones(1, 4))
    y.sum().backward()
    return ref, y.tolist(), [p.grad.full_tensor().sum().item() for p in net.parameters()]


@correct()
def tp_loss_parallel():
    """loss_parallel cross-entropy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel
    m = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    logits = distribute_tensor(torch.randn(4, 8), m, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.arange(4))
        loss.backward()
    return loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item(), logits.grad.full_tensor().abs().sum().item()


@correct()
def functional_all():
    """funcol: all_reduce, all_gather_tensor, reduce_scatter_tensor, broadcast, all_to_all_single, wait_tensor."""
    import torch.distributed._functional_collectives as fc
    W, r = dist.group.WORLD, dist.get_rank()
    a = fc.all_reduce(torch.ones(2) * r, "sum", W)
    kind = type(a).__name__
    b = fc.all_gather_tensor(torch.tensor([float(r)]), 0, W)
    c = fc.reduce_scatter_tensor(torch.arange(8.0), "sum", 0, W)
    d = fc.broadcast(torch.tensor([float(r)]), 2, W)
    e = fc.all_to_all_single(torch.arange(4.0) + 10 * r, None, None, W)
    return kind, fc.wait_tensor(a).tolist(), (b + 0).tolist(), (c * 1).tolist(), (d + 0).tolist(), fc.wait_tensor(e).tolist()


@correct()
def functional_gather_dim1():
    """all_gather_tensor along dim 1 and coalesced all_reduce."""
    import torch.distributed._functional_collectives as fc
    W, r = dist.group.WORLD, dist.get_rank()
    a = fc.all_gather_tensor(torch.full((2, 1), float(r)), 1, W)
    x, y = fc.all_reduce_coalesced([torch.ones(1), torch.ones(2) * r], "sum", W)
    return (a + 0).tolist(), (x + 0).tolist(), (y + 0).tolist()


@correct()
def functional_mesh_tuple():
    """Functional all_reduce over (mesh, dim) and average."""
    import torch.distributed._functional_collectives as fc
    from torch.distributed.device_mesh import init_device_mesh
    m = init_device_mesh("cpu", (2, 2))
    a = fc.all_reduce(torch.tensor([float(dist.get_rank())]), "max", (m, 0))
    b = fc.all_reduce(torch.tensor([float(dist.get_rank())]), "sum", (m, 1))
    return (a + 0).item(), (b + 0).item()


@correct(n=2)
def nn_functional_autograd():
    """torch.distributed.nn.functional with backward."""
    import torch.distributed.nn.functional as F
    x = torch.ones(2, requires_grad=True)
    y = F.all_reduce(x * (dist.get_rank() + 1))
    z = torch.cat(F.all_gather(x))
    (y.sum() + z.sum()).backward()
    return y.tolist(), z.tolist(), x.grad.tolist()


# ---------------------------------------------------------------- pipelining
def run_pipeline(name, n_micro, stages_per_rank=1):
    import torch.distributed.pipelining as pp
    r, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(n * stages_per_rank)]
    stages = [pp.PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in range(r, len(layers), n)]
    S = getattr(pp, name)
    losses = []
    s = S(stages if stages_per_rank > 1 else stages[0], n_micro, loss_fn=nn.MSELoss())
    for _ in range(2):
        if r == 0:
            s.step(torch.arange(16.0).view(4, 4) / 16, target=torch.ones(4, 4) if n == 1 else None)
        elif r == n - 1:
            losses = []
            s.step(target=torch.ones(4, 4), losses=losses)
        else:
            s.step()
    return [x.item() for x in losses], [layers[i].weight.grad.sum().item() for i in range(r, len(layers), n)]


@correct(n=2)
def pp_gpipe():
    """GPipe with two stages, two steps."""
    return run_pipeline("ScheduleGPipe", 2)


@correct()
def pp_1f1b():
    """1F1B with four stages."""
    return run_pipeline("Schedule1F1B", 4)


@correct(n=2)
def pp_interleaved():
    """Interleaved 1F1B with two stages per rank."""
    return run_pipeline("ScheduleInterleaved1F1B", 4, 2)


@correct(n=2)
def pp_looped_bfs():
    """Looped BFS with two stages per rank."""
    return run_pipeline("ScheduleLoopedBFS", 4, 2)


@correct(n=2)
def pp_zero_bubble():
    """Interleaved zero bubble."""
    return run_pipeline("ScheduleInterleavedZeroBubble", 4, 2)


# ---------------------------------------------------------------- checkpointing
def shared_folder():
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, 0)
    return path[0]


@correct(n=2)
def dcp_save_load():
    """dcp.save and dcp.load of plain tensors and numbers."""
    import torch.distributed.checkpoint as dcp
    path = shared_folder()
    dcp.save({"w": torch.arange(4.0), "n": 7}, checkpoint_id=path)
    sd = {"w": torch.zeros(4), "n": 0}
    dcp.load(sd, checkpoint_id=path)
    return sd["w"].tolist(), sd["n"]


@correct()
def dcp_save_load_sharded():
    """dcp with DTensors, loaded with another sharding."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    m = init_device_mesh("cpu", (4,))
    path = shared_folder()
    dcp.save({"w": distribute_tensor(torch.arange(16.0).view(8, 2), m, [Shard(0)])}, checkpoint_id=path)
    sd = {"w": distribute_tensor(torch.zeros(8, 2), m, [Replicate()])}
    dcp.load(sd, checkpoint_id=path)
    return sd["w"].to_local().tolist()


@correct(n=2)
def dcp_async_save():
    """dcp.async_save with a thread, awaited."""
    import torch.distributed.checkpoint as dcp
    path = shared_folder()
    g = dist.new_group([0, 1], backend="gloo")
    f = dcp.async_save({"w": torch.arange(4.0)}, checkpoint_id=path, process_group=g)
    t = torch.ones(1)
    dist.all_reduce(t)
    f.result()
    dist.barrier()
    sd = {"w": torch.zeros(4)}
    dcp.load(sd, checkpoint_id=path)
    return sd["w"].tolist(), t.item()


@correct(n=2)
def dcp_async_save_default_group():
    """dcp.async_save without a group, awaited at once."""
    import torch.distributed.checkpoint as dcp
    path = shared_folder()
    dcp.async_save({"w": torch.arange(4.0)}, checkpoint_id=path).result()
    dist.barrier()
    return sorted(os.listdir(path))


@correct(n=2)
def dcp_no_dist():
    """dcp.save with no_dist on rank 0 only."""
    import torch.distributed.checkpoint as dcp
    path = shared_folder()
    if dist.get_rank() == 0:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    dist.barrier()
    sd = {"w": torch.zeros(2)}
    dcp.load(sd, checkpoint_id=path)
    return sd["w"].tolist()


@correct(n=2)
def torch_save_on_rank0():
    """torch.save on rank 0, barrier, load on all."""
    path = os.path.join(shared_folder(), "m.pt")
    if dist.get_rank() == 0:
        torch.save({"w": torch.arange(3.0)}, path)
    dist.barrier()
    return torch.load(path)["w"].tolist()


# ---------------------------------------------------------------- the process around it
@correct(n=3)
def own_globals():
    """Module globals are per rank."""
    global COUNTER
    COUNTER += dist.get_rank() + 1
    CACHE[dist.get_rank()] = 1
    dist.barrier()
    return COUNTER, sorted(CACHE)


@correct(n=2)
def environment():
    """RANK, WORLD_SIZE, and own variables."""
    os.environ["MINE"] = f"r{dist.get_rank()}"
    dist.barrier()
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MINE"], os.getenv("LOCAL_RANK"), "MASTER_ADDR" in os.environ


@correct(n=2)
def working_folder():
    """chdir per rank and relative files."""
    old = os.getcwd()
    d = tempfile.mkdtemp()
    os.chdir(d)
    dist.barrier()
    open("x.txt", "w").write(str(dist.get_rank()))
    dist.barrier()
    out = open("x.txt").read(), os.path.realpath(os.getcwd()) == os.path.realpath(d), os.listdir(".")
    os.chdir(old)
    return out


@correct(n=2)
def seeds():
    """Per-rank seeds of torch, random, numpy with a collective in between."""
    import numpy as np
    torch.manual_seed(dist.get_rank()); random.seed(dist.get_rank()); np.random.seed(dist.get_rank())
    a = torch.rand(2).tolist()
    dist.barrier()
    return a, torch.rand(1).item(), random.random(), float(np.random.rand())


@correct(n=2)
def same_seed_everywhere():
    """The same seed on all ranks, randn interleaved with collectives."""
    torch.manual_seed(5)
    out = []
    for _ in range(3):
        t = torch.randn(2)
        dist.all_reduce(t)
        out.append(t.tolist())
    return out


@correct(n=2)
def default_dtype_per_rank():
    """set_default_dtype on rank 1 only."""
    if dist.get_rank() == 1:
        torch.set_default_dtype(torch.float64)
    dist.barrier()
    d = str(torch.ones(1).dtype)
    dist.barrier()
    torch.set_default_dtype(torch.float32)
    return d


@correct(n=2)
def grad_mode_per_rank():
    """set_grad_enabled(False) on one rank; inference_mode on another."""
    with torch.set_grad_enabled(dist.get_rank() == 0):
        dist.barrier()
        x = torch.ones(1, requires_grad=True) * 2
    return x.requires_grad, torch.is_grad_enabled()


@correct(n=2)
def redirect_stdout():
    """redirect_stdout captures this rank's prints only."""
    b = io.StringIO()
    with contextlib.redirect_stdout(b):
        print("rank", dist.get_rank())
        dist.barrier()
        print("again")
    return b.getvalue()


@correct(n=2)
def warnings_recorded():
    """catch_warnings records this rank's warning only."""
    with warnings.catch_warnings(record=True) as c:
        warnings.simplefilter("always")
        warnings.warn(f"from {dist.get_rank()}")
        dist.barrier()
    return [str(w.message) for w in c]


@correct(n=2)
def logging_handlers():
    """A logger with a handler per rank."""
    import logging
    b = io.StringIO()
    lg = logging.getLogger("mine")
    lg.handlers = [logging.StreamHandler(b)]
    lg.propagate = False
    dist.barrier()
    lg.warning("r%d", dist.get_rank())
    dist.barrier()
    return b.getvalue()


@correct(n=2)
def profiler():
    """torch.profiler around a step."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU]) as p:
        x = torch.ones(8, 8) @ torch.ones(8, 8)
        dist.all_reduce(x)
    return any("mm" in e.key for e in p.key_averages()), x[0, 0].item()


@correct(n=2)
def signal_handler():
    """signal.signal in the main thread of a rank and restoring."""
    old = signal.signal(signal.SIGUSR1, lambda *a: None)
    dist.barrier()
    signal.signal(signal.SIGUSR1, old)
    return "ok"


@correct(n=2)
def signal_delivered():
    """os.kill(getpid, SIGUSR1) runs this rank's handler."""
    got = []
    signal.signal(signal.SIGUSR1, lambda *a: got.append(dist.get_rank()))
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)
    dist.barrier()
    return got


@correct(n=2)
def pids_differ():
    """Ranks have their own pid."""
    o = [None, None]
    dist.all_gather_object(o, os.getpid())
    return o[0] != o[1]


@correct(n=2)
def subprocess_call():
    """A subprocess per rank."""
    import subprocess
    out = subprocess.run([sys.executable, "-c", "print(6*7)"], capture_output=True, text=True).stdout
    dist.barrier()
    return out


@correct(n=2)
def exception_handled_and_resumed():
    """Errors before any collective are handled on one rank."""
    try:
        if dist.get_rank() == 1:
            raise RuntimeError("x")
    except RuntimeError:
        pass
    finally:
        dist.barrier()
    return "ok"


@correct()
def consensus_on_error():
    """A rank's error is shared with an all_reduce of a flag and all skip the batch."""
    done = 0
    for step in range(3):
        bad = torch.zeros(1)
        try:
            if step == 1 and dist.get_rank() == 2:
                raise ValueError
        except ValueError:
            bad += 1
        dist.all_reduce(bad)
        if bad.item() == 0:
            done += 1
    return done


@correct(n=2)
def monotonic_clock():
    """time.sleep advances the clock by at least that."""
    a, b, c = time.time(), time.perf_counter(), time.monotonic()
    time.sleep(0.05)
    dist.barrier()
    return time.time() - a >= 0.04, time.perf_counter() - b >= 0.05, time.monotonic() - c >= 0.04


@correct(n=2)
def compile_eager():
    """torch.compile(backend='eager') around a function with a collective outside."""
    f = torch.compile(lambda x: x * 2 + 1, backend="eager")
    t = f(torch.ones(2) * dist.get_rank())
    dist.all_reduce(t)
    return t.tolist()


@correct(n=2)
def autocast_region():
    """CPU autocast on rank-wise data."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.ones(4, 4) @ torch.ones(4, 4)
        dist.barrier()
    return str(y.dtype)


@correct(n=2)
def autograd_function_with_comm():
    """An autograd.Function that all-reduces in backward, and tensor hooks."""
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            g = g.clone()
            dist.all_reduce(g)
            return g
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    (Copy.apply(x) * (dist.get_rank() + 1)).sum().backward()
    return x.grad.tolist()


@correct(n=2)
def grad_hook_async():
    """post-accumulate-grad hooks start async all-reduces (overlap), waited later."""
    net, ws = make_net(), []
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ws.append(dist.all_reduce(p.grad, async_op=True)))
    net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
    [w.wait() for w in ws]
    return [p.grad.sum().item() for p in net.parameters()]


@correct(n=2)
def contextvars_and_generators():
    """contextvars across collectives and generators."""
    import contextvars
    v = contextvars.ContextVar("v", default=-1)
    v.set(dist.get_rank())
    def gen():
        for i in range(3):
            t = torch.tensor([float(i)])
            dist.all_reduce(t)
            yield t.item()
    return list(gen()), v.get()


@correct(n=1)
def world_of_one():
    """Everything on a world of one."""
    t = torch.ones(2)
    dist.all_reduce(t); dist.broadcast(t, 0); dist.barrier()
    o = [None]
    dist.all_gather_object(o, "x")
    return t.tolist(), o


@correct(n=8)
def tree_reduce_eight():
    """Binomial tree on eight ranks with p2p."""
    r, t = dist.get_rank(), torch.tensor([float(dist.get_rank())])
    step = 1
    while step < 8:
        if r % (2 * step) == step:
            dist.send(t, r - step)
            break
        if r % (2 * step) == 0:
            u = torch.zeros(1)
            dist.recv(u, r + step)
            t += u
        step *= 2
    dist.broadcast(t, 0)
    return t.item()


@correct()
def hierarchical_all_reduce():
    """Intra-pair reduce, leaders all-reduce, broadcast."""
    r = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    lead = dist.new_group([0, 2])
    t = torch.tensor([float(r)])
    dist.reduce(t, r // 2 * 2, group=pairs[r // 2])
    if r % 2 == 0:
        dist.all_reduce(t, group=lead)
    dist.broadcast(t, r // 2 * 2, group=pairs[r // 2])
    return t.item()


# ---------------------------------------------------------------- more threads of a rank
@correct(n=2)
def two_recv_threads_tags():
    """Two threads of rank 1 receive by tag at the same time; sent in the other order."""
    g = [dist.new_group([0, 1]) for _ in range(2)]
    out = {}
    if dist.get_rank() == 0:
        for i in (1, 0):
            dist.send(torch.tensor([float(i)]), 1, group=g[i])
        return None
    def rx(i):
        t = torch.zeros(1)
        dist.recv(t, 0, group=g[i])
        out[i] = t.item()
    ths = [threading.Thread(target=rx, args=(i,)) for i in (0, 1)]
    [t.start() for t in ths]
    [t.join() for t in ths]
    return sorted(out.items())


@correct(n=2)
def thread_recv_while_main_sleeps():
    """A thread waits in recv while main sleeps and then receives its result by a queue."""
    if dist.get_rank() == 0:
        time.sleep(0.1)
        dist.send(torch.tensor([4.0]), 1)
        return None
    q = queue.Queue()
    def rx():
        t = torch.zeros(1)
        dist.recv(t, 0)
        q.put(t.item())
    threading.Thread(target=rx).start()
    time.sleep(0.3)
    return q.get(timeout=20)


@correct(n=2)
def thread_recv_while_main_computes():
    """A thread waits in recv while main computes."""
    if dist.get_rank() == 0:
        dist.send((torch.ones(16, 16) @ torch.ones(16, 16))[0, :1].clone(), 1)
        return None
    t = torch.zeros(1)
    th = threading.Thread(target=dist.recv, args=(t, 0))
    th.start()
    x = torch.ones(16, 16)
    for _ in range(50):
        x = x @ x / 16
    th.join()
    return t.item(), x[0, 0].item()


@correct(n=2)
def thread_recv_main_all_reduce():
    """A thread waits in recv on a group of its own while main all-reduces in the world, then the peer sends."""
    g = dist.new_group([0, 1])
    t, s = torch.zeros(1), torch.ones(1)
    if dist.get_rank() == 1:
        th = threading.Thread(target=dist.recv, args=(t, 0), kwargs={"group": g})
        th.start()
    for _ in range(3):
        dist.all_reduce(s)
    if dist.get_rank() == 0:
        dist.send(torch.tensor([9.0]), 1, group=g)
    else:
        th.join()
    dist.barrier()
    return t.item(), s.item()


@correct(n=2)
def thread_send_main_recv():
    """Both ranks send in a thread and receive in main (the usual way round the send/recv cycle)."""
    g = dist.new_group([0, 1])
    r, t = dist.get_rank(), torch.zeros(1)
    th = threading.Thread(target=dist.send, args=(torch.tensor([r + 1.0]), 1 - r))
    th.start()
    dist.recv(t, 1 - r)
    th.join()
    return t.item()


@correct(n=2)
def control_and_data_threads():
    """Control channel in a thread stops the data loop of main."""
    g = dist.new_group([0, 1])
    stop = threading.Event()
    if dist.get_rank() == 0:
        for i in range(3):
            dist.send(torch.tensor([float(i)]), 1)
        dist.send(torch.ones(1), 1, group=g)
        return "sent"
    def control():
        dist.recv(torch.zeros(1), 0, group=g)
        stop.set()
    th = threading.Thread(target=control)
    th.start()
    out = []
    for _ in range(3):
        t = torch.zeros(1)
        dist.recv(t, 0)
        out.append(t.item())
    stopped = stop.wait(20)
    th.join()
    return out, stopped


@correct(n=3)
def any_source_thread_and_main_group():
    """A server thread takes any-source messages while main barriers in another group."""
    g = dist.new_group([0, 1, 2])
    if dist.get_rank() == 0:
        got = []
        def serve():
            for _ in range(2):
                t = torch.zeros(1)
                src = dist.recv(t)
                got.append((src, t.item()))
        th = threading.Thread(target=serve)
        th.start()
        dist.barrier(group=g)
        th.join()
        return sorted(got)
    dist.send(torch.tensor([dist.get_rank() * 1.0]), 0)
    dist.barrier(group=g)


@correct(n=2)
def pool_two_workers_two_groups():
    """ThreadPoolExecutor(2) with a group per worker."""
    gs = [dist.new_group([0, 1]) for _ in range(2)]
    def f(i):
        t = torch.tensor([float(i + 1)])
        dist.all_reduce(t, group=gs[i])
        return t.item()
    with ThreadPoolExecutor(2) as p:
        return [x.result() for x in [p.submit(f, i) for i in range(2)]]


@correct(n=2)
def pool_async_checkpoint_barrier():
    """The saver thread saves and barriers on its own group while main trains."""
    g = dist.new_group([0, 1])
    d = tempfile.mkdtemp()
    def save(t, s):
        torch.save(t, os.path.join(d, f"{s}.pt"))
        dist.barrier(group=g)
        return s
    t, fs = torch.ones(1), []
    with ThreadPoolExecutor(1) as p:
        for s in range(3):
            dist.all_reduce(t)
            fs.append(p.submit(save, t.clone(), s))
    return [f.result() for f in fs], t.item()


@correct(n=2)
def thread_starts_thread():
    """A thread starts a thread that communicates."""
    out = []
    def inner():
        t = torch.ones(1)
        dist.all_reduce(t)
        out.append(t.item())
    def outer():
        th = threading.Thread(target=inner)
        th.start(); th.join()
    th = threading.Thread(target=outer)
    th.start(); th.join()
    return out


@correct(n=2)
def thread_store_and_collective():
    """A thread waits in the store while main communicates."""
    s = dist.PrefixStore("t", dist.distributed_c10d._get_default_store())
    out = []
    th = threading.Thread(target=lambda: out.append(s.get(f"for-{dist.get_rank()}").decode()))
    th.start()
    t = torch.ones(1)
    dist.all_reduce(t)
    s.set(f"for-{1 - dist.get_rank()}", "hi")
    th.join()
    dist.barrier()
    return out, t.item()


@correct(n=2)
def lock_around_collectives():
    """Threads serialise their collectives with a lock and turn order."""
    lock, cond, turn, out = threading.Lock(), threading.Condition(), [0], []
    def f(i):
        with cond:
            cond.wait_for(lambda: turn[0] == i)
        with lock:
            t = torch.tensor([float(i)])
            dist.all_reduce(t)
            out.append(t.item())
        with cond:
            turn[0] += 1
            cond.notify_all()
    ths = [threading.Thread(target=f, args=(i,)) for i in (2, 0, 1)]
    [t.start() for t in ths]
    [t.join() for t in ths]
    return out


@correct(n=2)
def busy_flag_between_threads():
    """Main spins on a flag that a thread sets after its recv."""
    t, done = torch.zeros(1), []
    if dist.get_rank() == 0:
        time.sleep(0.05)
        dist.send(torch.ones(1), 1)
        return None
    def rx():
        dist.recv(t, 0)
        done.append(1)
    threading.Thread(target=rx).start()
    while not done:
        time.sleep(0.001)
    return t.item()


@correct(n=2)
def future_result_timeout_then_ok():
    """Future.result(timeout) expires on a waiting recv, then succeeds."""
    import concurrent.futures as cf
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        time.sleep(1)
        dist.send(torch.ones(1), 1)
        return None
    with ThreadPoolExecutor(1) as p:
        f = p.submit(dist.recv, t, 0)
        try:
            f.result(timeout=0.2)
            late = False
        except cf.TimeoutError:
            late = True
        return late, f.result(), t.item()


@correct(n=2)
def queue_get_timeout_then_ok():
    """queue.get(timeout) raises Empty while the receiver waits, then gets."""
    if dist.get_rank() == 0:
        time.sleep(1)
        dist.send(torch.ones(1), 1)
        return None
    q, t = queue.Queue(), torch.zeros(1)
    def rx():
        dist.recv(t, 0)
        q.put(t.item())
    threading.Thread(target=rx).start()
    empties = 0
    while True:
        try:
            return q.get(timeout=0.3), empties > 0
        except queue.Empty:
            empties += 1


@correct(n=2)
def event_wait_timeout_with_recv():
    """ev.wait(0.2) is False while the message is late, True later."""
    if dist.get_rank() == 0:
        time.sleep(1)
        dist.send(torch.ones(1), 1)
        return None
    ev = threading.Event()
    def rx():
        dist.recv(torch.zeros(1), 0)
        ev.set()
    threading.Thread(target=rx).start()
    return ev.wait(0.2), ev.wait(20)


@correct(n=2)
def elastic_survivor_after_timeout():
    """Rank 1 'fails'; rank 0 notices by a time limit on its group and goes on alone."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return "failed"
    try:
        dist.all_reduce(torch.ones(1), group=g)
        return "both"
    except RuntimeError:
        return "alone"


@correct(n=2)
def slow_start_within_group_timeout():
    """A group with 5 s and a peer 1 s late: works."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    if dist.get_rank() == 1:
        time.sleep(1)
    t = torch.ones(1)
    dist.all_reduce(t, group=g)
    return t.item()


@correct(n=2)
def reinit_world():
    """Destroys the world and initialises it again with a FileStore."""
    path = shared_folder()
    r = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{path}/again", rank=r, world_size=2)
    t = torch.ones(1)
    dist.all_reduce(t)
    return t.item()


@correct(n=2)
def monkey_patched_rank_helper():
    """functools.lru_cache and module-level state per rank."""
    import functools
    @functools.lru_cache
    def me():
        return dist.get_rank()
    dist.barrier()
    return me(), me.cache_info().hits


# ---------------------------------------------------------------- third helping: API
@correct()
def single_api_names():
    """all_gather_single, reduce_scatter_single where torch has them."""
    r, out = dist.get_rank(), []
    if hasattr(dist, "all_gather_single"):
        t = torch.zeros(4)
        dist.all_gather_single(t, torch.tensor([float(r)]))
        out.append(t.tolist())
    if hasattr(dist, "reduce_scatter_single"):
        t = torch.zeros(1)
        dist.reduce_scatter_single(t, torch.arange(4.0))
        out.append(t.tolist())
    return out


@correct(n=2)
def work_methods():
    """is_success, exception, result of a finished work, where gloo has them."""
    t = torch.ones(1)
    w = dist.all_reduce(t, async_op=True)
    w.wait()
    try:
        return w.is_completed(), w.is_success(), w.exception() is None
    except Exception as e:
        return type(e).__name__


@correct(n=2)
def work_result():
    """work.result() as on gloo."""
    w = dist.all_reduce(torch.ones(2), async_op=True)
    w.wait()
    try:
        return [x.tolist() for x in w.result()]
    except Exception as e:
        return type(e).__name__


@correct(n=2)
def future_done_callback():
    """add_done_callback on a work's future."""
    got = []
    f = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    f.add_done_callback(lambda f: got.append(f.value()[0].sum().item()))
    f.wait()
    dist.barrier()
    return got


@correct(n=2)
def future_collect_all():
    """torch.futures.collect_all of three works."""
    fs = [dist.all_reduce(torch.full((1,), float(i)), async_op=True).get_future() for i in range(3)]
    return [f.value()[0].item() for f in torch.futures.wait_all(fs) and torch.futures.collect_all(fs).wait()]


@correct()
def group_dst_src_everywhere():
    """group_src/group_dst of reduce, scatter, gather, gather_object."""
    g = dist.new_group([1, 2, 3])
    r = dist.get_rank()
    if r == 0:
        return None
    t = torch.tensor([float(r)])
    dist.reduce(t, group=g, group_dst=2)
    s = torch.zeros(1)
    dist.scatter(s, [torch.tensor([10.0 * i]) for i in range(3)] if r == 1 else None, group=g, group_src=0)
    o = [None] * 3 if r == 2 else None
    dist.gather_object(r, o, group=g, group_dst=1)
    return t.item() if r == 3 else None, s.item(), o


@correct()
def rank_translation():
    """get_group_rank, get_global_rank."""
    g = dist.new_group([1, 3])
    return [dist.get_group_rank(g, 3), dist.get_global_rank(g, 0)] if dist.get_rank() in (1, 3) else None


@correct(n=2)
def broadcast_object_device():
    """broadcast_object_list(device=cpu) and a big object."""
    o = [list(range(1000))] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(o, 0, device=torch.device("cpu"))
    return sum(o[0])


@correct(n=2)
def dataclass_and_enum_objects():
    """Named tuples, sets, bytes and functions by name as objects."""
    o = [None, None]
    dist.all_gather_object(o, ({1, 2}, b"x", len, float("inf"), slice(1, 2)))
    return str(o)


@correct(n=2)
def join_context_custom():
    """Join with ZeRO and DDP together."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer
    net = DDP(make_net())
    opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    n = 0
    with Join([net, opt]):
        for _ in range(2 + dist.get_rank()):
            opt.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            opt.step()
            n += 1
    return n, [p.sum().item() for p in net.parameters()]


@correct(n=2)
def post_local_sgd():
    """PostLocalSGDOptimizer."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    net = DDP(make_net())
    net.register_comm_hook(PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2), post_localSGD_hook)
    opt = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2))
    for _ in range(5):
        opt.zero_grad()
        net(torch.ones(1, 4) * dist.get_rank()).sum().backward()
        opt.step()
    return [round(p.sum().item(), 4) for p in net.parameters()]


@correct(n=2)
def fsdp2_mixed_precision():
    """MixedPrecisionPolicy in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    net = fully_shard(make_net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    y = net(torch.ones(1, 4))
    y.sum().backward()
    return str(y.dtype), [round(p.grad.full_tensor().sum().item(), 2) for p in net.parameters()]


@correct(n=2)
def fsdp2_dcp_roundtrip():
    """FSDP2 model and optimizer through dcp with state-dict helpers."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard
    net = fully_shard(make_net())
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    opt.step()
    m, o = get_state_dict(net, opt)
    path = shared_folder()
    dcp.save({"m": m, "o": o}, checkpoint_id=path)
    net2 = fully_shard(make_net(9))
    opt2 = torch.optim.Adam(net2.parameters(), lr=0.1)
    m2, o2 = get_state_dict(net2, opt2)
    dcp.load({"m": m2, "o": o2}, checkpoint_id=path)
    set_state_dict(net2, opt2, model_state_dict=m2, optim_state_dict=o2)
    return [p.full_tensor().sum().item() for p in net2.parameters()]


@correct(n=2)
def fsdp2_tp_2d_one_dim():
    """TP and then FSDP2 on a (1,2) mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    m = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(make_net(), m["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=m["dp"])
    net(torch.ones(1, 4)).sum().backward()
    return [p.grad.full_tensor().sum().item() for p in net.parameters()]


@correct()
def tp_fsdp_2x2():
    """TP and FSDP2 on a 2x2 mesh, two Adam steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    m = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(make_net(), m["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=m["dp"])
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(2):
        opt.zero_grad()
        net(torch.ones(1, 4) * (1 + dist.get_rank() // 2)).sum().backward()
        opt.step()
    return [p.full_tensor().sum().item() for p in net.parameters()]


@correct()
def tp_sequence_parallel():
    """SequenceParallel LayerNorm and PrepareModuleInput."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
    m = init_device_mesh("cpu", (4,))
    parallelize_module(net, m, {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Replicate())})
    x = torch.arange(64.0).view(1, 8, 8) / 64
    return net(x).sum().item()


@correct()
def local_map_call():
    """local_map over DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map
    m = init_device_mesh("cpu", (4,))
    d = distribute_tensor(torch.arange(8.0), m, [Shard(0)])
    f = local_map(lambda x: x * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=m)
    return f(d).full_tensor().tolist()


@correct(n=2)
def async_collective_tensor_not_waited():
    """An AsyncCollectiveTensor that is used in arithmetic without wait_tensor."""
    import torch.distributed._functional_collectives as fc
    a = fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    b = torch.stack([a, a * 2]).sum()
    return b.item(), a.tolist()


@correct(n=2)
def funcol_autograd():
    """Autograd versions of functional collectives."""
    import torch.distributed._functional_collectives as fc
    x = torch.ones(2, requires_grad=True)
    y = fc.all_gather_tensor_autograd(x * (1 + dist.get_rank()), 0, dist.group.WORLD)
    y.sum().backward()
    return fc.wait_tensor(y.detach()).tolist() if True else None, x.grad.tolist()


@correct(n=2)
def tensor_subview_recv():
    """recv into a row of a matrix and into a reshaped view."""
    m = torch.zeros(3, 4)
    if dist.get_rank() == 0:
        dist.send(torch.arange(4.0), 1)
        dist.send(torch.arange(4.0), 1)
        return None
    dist.recv(m[1], 0)
    dist.recv(m[2].view(2, 2), 0)
    return m.tolist()


@correct(n=2)
def nan_and_inf():
    """NaN and infinity through SUM, MAX and MIN."""
    out = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN):
        t = torch.tensor([float("inf") if dist.get_rank() else 1.0, -float("inf")])
        dist.all_reduce(t, op=op)
        out.append(str(t.tolist()))
    return out


@correct(n=2)
def uint8_overflow():
    """uint8 sums wrap around as on gloo."""
    t = torch.full((2,), 200, dtype=torch.uint8)
    dist.all_reduce(t)
    return t.tolist()


@correct(n=3)
def reduce_order_float():
    """float16 sums of three ranks."""
    t = torch.tensor([1000.0, 0.1, 1e-4]) .half() * (dist.get_rank() + 1)
    dist.all_reduce(t)
    return [round(x, 1) for x in t.tolist()]


@correct(n=2)
def sub_world_pipeline_threads_free():
    """ring attention style: batch p2p per step with double buffers."""
    r, k = dist.get_rank(), torch.full((2,), float(dist.get_rank()))
    acc = torch.zeros(2)
    for _ in range(2):
        nxt = torch.empty(2)
        ws = dist.batch_isend_irecv([dist.P2POp(dist.isend, k, 1 - r), dist.P2POp(dist.irecv, nxt, 1 - r)])
        acc += k
        [w.wait() for w in ws]
        k = nxt
    return acc.tolist()


@correct(n=2)
def faulthandler_and_excepthook():
    """sys.excepthook, sys.setrecursionlimit, sys.settrace per rank restored."""
    old = sys.getrecursionlimit()
    sys.setrecursionlimit(old + 10)
    dist.barrier()
    x = sys.getrecursionlimit() - old
    dist.barrier()
    sys.setrecursionlimit(old)
    return x > 0


@correct(n=2)
def stdin_print_flush(): 
    """print with flush and sys.stdout.write return as always."""
    n = sys.stdout.write("")
    print("", end="", flush=True)
    dist.barrier()
    return n


@correct(n=2)
def tempfile_exchange():
    """Rank 0 writes a file and tells its name through the store."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile("w", delete=False) as f:
            f.write("hello")
        s.set("file", f.name)
        return "written"
    return open(s.get("file").decode()).read()


@correct(n=2)
def file_flag_poll():
    """Rank 1 polls for a file that rank 0 writes later."""
    path = os.path.join(shared_folder(), "flag")
    if dist.get_rank() == 0:
        time.sleep(0.2)
        open(path, "w").close()
        return "set"
    while not os.path.exists(path):
        time.sleep(0.02)
    return "seen"


@correct(n=2)
def file_lock_between_ranks():
    """fcntl.flock around a shared counter file."""
    import fcntl
    path = os.path.join(shared_folder(), "n")
    with open(path, "a+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        n = int(f.read() or 0)
        time.sleep(0.01)
        f.seek(0); f.truncate(); f.write(str(n + 1)); f.flush()
        fcntl.flock(f, fcntl.LOCK_UN)
    dist.barrier()
    return open(path).read()


@correct(n=2)
def socket_between_ranks():
    """A TCP socket of one's own between two ranks."""
    import socket
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        srv = socket.create_server(("127.0.0.1", 0))
        s.set("sock", str(srv.getsockname()[1]))
        c, _ = srv.accept()
        c.sendall(b"hi"); c.close(); srv.close()
        return "sent"
    c = socket.create_connection(("127.0.0.1", int(s.get("sock"))))
    return c.recv(2).decode()


@correct(n=2)
def multiprocessing_child():
    """A child process by multiprocessing (spawn-free: fork is not used) via subprocess with a pipe."""
    import subprocess
    p = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    out, _ = p.communicate(f"r{dist.get_rank()}")
    dist.barrier()
    return out


@correct(n=2)
def torch_threads_setting():
    """set_num_threads on one rank."""
    torch.set_num_threads(1 + dist.get_rank())
    dist.barrier()
    n = torch.get_num_threads()
    dist.barrier()
    torch.set_num_threads(1)
    return n


@correct(n=2)
def deterministic_flag_per_rank():
    """use_deterministic_algorithms on one rank only."""
    torch.use_deterministic_algorithms(dist.get_rank() == 1)
    dist.barrier()
    d = torch.are_deterministic_algorithms_enabled()
    dist.barrier()
    torch.use_deterministic_algorithms(False)
    return d


@correct(n=2)
def inference_mode_across_collective():
    """inference_mode on one rank during a collective."""
    with torch.inference_mode(dist.get_rank() == 1):
        t = torch.ones(1)
        dist.all_reduce(t)
        return t.is_inference(), t.item()


@correct(n=2)
def anomaly_mode_one_rank():
    """autograd.detect_anomaly on rank 1 only: process-wide flag read by the other."""
    with torch.autograd.set_detect_anomaly(dist.get_rank() == 1):
        dist.barrier()
        x = torch.is_anomaly_enabled()
        dist.barrier()
    return x


@correct(n=2)
def sdpa_and_module_hooks():
    """Global module hooks registered by one rank only."""
    from torch.nn.modules.module import register_module_forward_hook
    seen = []
    h = register_module_forward_hook(lambda m, a, o: seen.append(1)) if dist.get_rank() == 1 else None
    dist.barrier()
    nn.Identity()(torch.ones(1))
    dist.barrier()
    if h:
        h.remove()
    return len(seen)


@correct(n=2)
def torch_function_mode():
    """TorchDispatchMode on one rank during a collective of both."""
    from torch.utils._python_dispatch import TorchDispatchMode
    class Count(TorchDispatchMode):
        n = 0
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            Count.n += 0
            self.k = getattr(self, "k", 0) + 1
            return f(*args, **(kwargs or {}))
    c = Count()
    with c:
        x = torch.ones(2) + 1
    dist.all_reduce(x)
    return c.k, x.tolist()


@correct(n=2)
def clock_same_in_threads():
    """time.monotonic/time/perf_counter in a thread are within 5 s of main's."""
    out = []
    now = time.monotonic(), time.time(), time.perf_counter()
    th = threading.Thread(target=lambda: out.extend([time.monotonic(), time.time(), time.perf_counter()]))
    th.start(); th.join()
    dist.barrier()
    return [abs(a - b) < 5 for a, b in zip(now, out)]


@correct(n=2)
def sleep_order_main_and_thread():
    """A thread sleeps 0.1 s, main 0.6 s: the thread's entry comes first."""
    log = []
    th = threading.Thread(target=lambda: (time.sleep(0.1), log.append("thread")))
    th.start()
    time.sleep(0.6)
    log.append("main")
    th.join()
    dist.barrier()
    return log


@correct(n=2)
def sleep_order_two_threads():
    """Two threads sleep 0.3 and 0.1 s: the shorter one is first."""
    log = []
    ths = [threading.Thread(target=lambda s=s: (time.sleep(s), log.append(s))) for s in (0.3, 0.1)]
    [t.start() for t in ths]
    [t.join() for t in ths]
    dist.barrier()
    return log


@correct(n=2)
def sleep_long_in_thread_joined_late():
    """A thread sleeps 1 s and sends; the peer's recv takes at least 1 s by its clock."""
    if dist.get_rank() == 0:
        th = threading.Thread(target=lambda: (time.sleep(1), dist.send(torch.ones(1), 1)))
        th.start(); th.join()
        return None
    t0 = time.monotonic()
    dist.recv(torch.zeros(1), 0)
    return time.monotonic() - t0 > 0.9


@correct(n=2)
def event_wait_takes_time():
    """ev.wait(0.5) that expires takes 0.5 s by the rank's clock."""
    t0 = time.monotonic()
    r = threading.Event().wait(0.5)
    d = time.monotonic() - t0
    dist.barrier()
    return r, d > 0.45


@correct(n=2)
def late_by_two_event_timeouts():
    """Rank 0 waits 0.5 s in an Event, rank 1 sleeps 0.1 s: rank 1 is at the barrier first by time.monotonic of both."""
    o = [None, None]
    t0 = time.monotonic()
    if dist.get_rank() == 0:
        threading.Event().wait(0.5)
    else:
        time.sleep(0.1)
    dist.all_gather_object(o, time.monotonic() - t0)
    return o[0] > o[1]


@correct(n=2)
def deadline_loop():
    """A poll with a deadline of one's own: gives up after 0.5 s since the key never comes."""
    s = dist.distributed_c10d._get_default_store()
    end, n = time.monotonic() + 0.5, 0
    while time.monotonic() < end:
        if s.check(["never"]):
            return "came"
        n += 1
        time.sleep(0.05)
    dist.barrier()
    return "gave up", n > 3


@correct(n=2)
def deadline_loop_busy():
    """The same without a sleep."""
    s = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        if s.check(["never"]):
            return "came"
    dist.barrier()
    return "gave up"


@correct(n=2)
def deadline_loop_compute():
    """Trains until 0.3 s have passed by perf_counter, then agrees on the number of steps."""
    end, n = time.perf_counter() + 0.3, 0
    while time.perf_counter() < end:
        n += 1
        time.sleep(0.01)
    t = torch.tensor([min(n, 5)])
    dist.all_reduce(t)
    return t.item()


@correct(n=2)
def busy_wait_until_time():
    """Spins on time.time() for 0.2 s."""
    end = time.time() + 0.2
    while time.time() < end:
        pass
    dist.barrier()
    return "spun"


@correct(n=3)
def rank_identity_beside_thread():
    """dist.get_rank() in main stays the same while a thread of the rank receives."""
    r, g = dist.get_rank(), dist.new_group([0, 1, 2])
    ids, got = [], torch.zeros(1)
    th = threading.Thread(target=dist.recv, args=(got, (r - 1) % 3), kwargs={"group": g})
    th.start()
    for _ in range(20):
        ids.append(dist.get_rank())
        time.sleep(0.01)
    dist.send(torch.tensor([float(r)]), (r + 1) % 3, group=g)
    th.join()
    return sorted(set(ids)), got.item()


@correct(n=3)
def rank_identity_in_threads():
    """dist.get_rank(), os.environ['RANK'] and the world's size in four threads at once."""
    out = []
    def f():
        for _ in range(5):
            out.append((dist.get_rank(), os.environ["RANK"], dist.get_world_size()))
            time.sleep(0.002)
    ths = [threading.Thread(target=f) for _ in range(4)]
    [t.start() for t in ths]
    [t.join() for t in ths]
    dist.barrier()
    return sorted(set(out)), len(out)


@correct(n=2)
def rng_in_thread():
    """Main seeds, a thread draws, main draws: one generator per rank."""
    torch.manual_seed(dist.get_rank())
    a = []
    th = threading.Thread(target=lambda: a.append(torch.rand(1).item()))
    th.start(); th.join()
    dist.barrier()
    return a[0], torch.rand(1).item()


@correct(n=2)
def rng_in_pool():
    """random and numpy in a pool after seeding in main."""
    import numpy as np
    random.seed(dist.get_rank()); np.random.seed(dist.get_rank())
    with ThreadPoolExecutor(1) as p:
        a = p.submit(random.random).result(), p.submit(lambda: float(np.random.rand())).result()
    dist.barrier()
    return a, random.random()


@correct(n=2)
def ddp_with_logging_thread():
    """DDP training while a logger thread drains a queue."""
    q, log = queue.Queue(), []
    def drain():
        while (x := q.get()) is not None:
            log.append(round(x, 4))
    th = threading.Thread(target=drain)
    th.start()
    net = DDP(make_net())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(4):
        opt.zero_grad()
        loss = net(torch.ones(1, 4) * (i + dist.get_rank())).pow(2).mean()
        loss.backward()
        opt.step()
        q.put(loss.item())
    q.put(None)
    th.join()
    return log


@correct(n=2)
def ddp_with_prefetch_thread():
    """DDP fed by a prefetch thread with a bounded queue that draws random batches."""
    q = queue.Queue(2)
    def load():
        g = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            q.put(torch.rand(2, 4, generator=g))
        q.put(None)
    threading.Thread(target=load, daemon=True).start()
    net, out = DDP(make_net()), []
    while (x := q.get()) is not None:
        net.zero_grad()
        net(x).sum().backward()
        out.append(round(sum(p.grad.sum().item() for p in net.parameters()), 3))
    return out


@correct(n=2)
def ddp_async_save_each_step():
    """DDP with an asynchronous torch.save of the state dict after every step."""
    d = tempfile.mkdtemp()
    net = DDP(make_net())
    with ThreadPoolExecutor(1) as p:
        fs = []
        for i in range(3):
            net(torch.ones(1, 4)).sum().backward()
            sd = {k: v.clone() for k, v in net.module.state_dict().items()}
            fs.append(p.submit(torch.save, sd, os.path.join(d, f"{i}.pt")))
        [f.result() for f in fs]
    return len(os.listdir(d)), [p.grad.sum().item() for p in net.parameters()]


@correct(n=2)
def ddp_heartbeat_store_thread():
    """DDP with a heartbeat thread that adds to a store counter."""
    s, stop = dist.PrefixStore("hb", dist.distributed_c10d._get_default_store()), threading.Event()
    def beat():
        while not stop.is_set():
            s.add(f"r{dist.get_rank()}", 1)
            stop.wait(0.005)
    th = threading.Thread(target=beat)
    th.start()
    net = DDP(make_net())
    for _ in range(5):
        net.zero_grad()
        net(torch.ones(1, 4) * (1 + dist.get_rank())).sum().backward()
    stop.set(); th.join()
    dist.barrier()
    return s.add(f"r{1 - dist.get_rank()}", 0) > 0, [p.grad.sum().item() for p in net.parameters()]


@correct(n=3)
def rank_identity_of_thread_beside_main():
    """dist.get_rank() in a thread is the rank's own while main communicates."""
    seen, stop = set(), threading.Event()
    def look():
        while not stop.is_set():
            try:
                seen.add(dist.get_rank())
            except Exception as e:
                seen.add(type(e).__name__)
            time.sleep(0)
    th = threading.Thread(target=look)
    th.start()
    t = torch.ones(1000)
    for _ in range(200):
        dist.all_reduce(t)
        t /= 3
    stop.set(); th.join()
    return sorted(map(str, seen))


@correct(n=3)
def environ_of_thread_beside_main():
    """os.environ['RANK'] in a thread is the rank's own while main communicates."""
    seen, stop = set(), threading.Event()
    def look():
        while not stop.is_set():
            seen.add(os.environ.get("RANK"))
            time.sleep(0)
    th = threading.Thread(target=look)
    th.start()
    t = torch.ones(1000)
    for _ in range(200):
        dist.all_reduce(t)
        t /= 3
    stop.set(); th.join()
    return sorted(map(str, seen))


@correct(n=3)
def rng_of_main_beside_thread():
    """torch.rand in main after a per-rank seed isn't disturbed by a thread with its own generator; main communicates."""
    stop = threading.Event()
    g = torch.Generator().manual_seed(99)
    def draw():
        while not stop.is_set():
            torch.rand(10, generator=g)
            time.sleep(0)
    th = threading.Thread(target=draw)
    th.start()
    torch.manual_seed(dist.get_rank())
    out = []
    for _ in range(20):
        x = torch.rand(1)
        out.append(x.item())
        dist.all_reduce(x)
    stop.set(); th.join()
    return out
