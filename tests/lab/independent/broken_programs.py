"""Broken programs. `# BUG` marks the line that a perfect report names."""
import os, queue, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from registry import broken


# ---------------------------------------------------------------- collectives: order, missing, args
@broken()
def order_swapped_on_last_rank():
    """Two all-reduces; the last rank makes them in the other order with other shapes. Report: call 1 has shape (3,) on
    ranks 0-2 and (5,) on rank 3; same order everywhere."""
    a, b = torch.ones(3), torch.ones(5)
    for t in ([b, a] if dist.get_rank() == 3 else [a, b]):
        dist.all_reduce(t)  # BUG


@broken()
def log_on_rank0_with_reduce():
    """Only rank 0 reduces the loss for logging. Report: rank 0 alone calls reduce, ranks 1-3 have gone on to barrier; all
    must call reduce."""
    loss = torch.tensor(1.0)
    if dist.get_rank() == 0:
        dist.reduce(loss, 0)  # BUG
        print(loss.item(), end="")
    dist.barrier()


@broken()
def early_return_without_data():
    """A rank with an empty shard returns before the all-reduce. Report: rank 3 has returned (at its return line), 0-2 wait
    in all_reduce."""
    shard = list(range(dist.get_rank(), 3, 4))
    if not shard:
        return 0  # BUG
    t = torch.tensor(float(sum(shard)))
    dist.all_reduce(t)
    return t.item()


@broken()
def uneven_batches():
    """Ranks have different numbers of batches and all-reduce per batch. Report: rank 0 waits in its all_reduce number 4,
    others have returned after 3; join or equal number of steps."""
    for _ in range(3 + (dist.get_rank() == 0)):
        g = torch.ones(4)
        dist.all_reduce(g)  # BUG


@broken()
def loss_dependent_break():
    """Each rank stops when its own loss is small: they leave the loop at different steps. Report: which ranks left, and who
    waits in all_reduce."""
    loss = 1.0 / (1 + dist.get_rank())
    while loss > 0.1:
        g = torch.tensor(loss)
        dist.all_reduce(g)  # BUG
        loss /= 2
    return loss


@broken()
def shape_differs_drop_last():
    """The last rank gathers a short last batch. Report: all_gather with (8,2) on ranks 0-2 and (5,2) on rank 3."""
    x = torch.ones(5 if dist.get_rank() == 3 else 8, 2)
    out = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(out, x)  # BUG


@broken()
def dtype_differs_amp_on_one():
    """Rank 1 reduces its gradient in bfloat16, the rest in float32. Report: dtype mismatch with rank 1 named."""
    g = torch.ones(8, dtype=torch.bfloat16 if dist.get_rank() == 1 else torch.float32)
    dist.all_reduce(g)  # BUG


@broken()
def op_differs():
    """Rank 2 takes MAX, the others SUM. Report: op mismatch, rank 2."""
    t = torch.ones(2) * dist.get_rank()
    dist.all_reduce(t, op=dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM)  # BUG
    return t.tolist()


@broken()
def root_differs():
    """Everyone broadcasts from itself. Report: root mismatch, src=rank on each rank."""
    t = torch.ones(2) * dist.get_rank()
    dist.broadcast(t, src=dist.get_rank())  # BUG
    return t.tolist()


@broken()
def reduce_root_off_by_one():
    """Rank 3 believes that the root is the last rank. Report: dst differs: 0 on ranks 0-2, 3 on rank 3."""
    t = torch.ones(2)
    dist.reduce(t, dst=3 if dist.get_rank() == 3 else 0)  # BUG
    return t.tolist()


@broken()
def reduce_against_all_reduce():
    """Rank 0 calls reduce(dst=0), the others all_reduce. Report: operation mismatch."""
    t = torch.ones(2)
    if dist.get_rank() == 0:
        dist.reduce(t, 0)  # BUG
    else:
        dist.all_reduce(t)


@broken()
def barrier_only_workers():
    """Workers wait in a barrier of the world, the master does not take part and waits for a message that comes after it.
    Report: rank 0 waits in recv from rank 1, ranks 1-3 in barrier: rank 0 must call the barrier."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.recv(t, 1)  # BUG
    else:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(t, 0)


@broken()
def scatter_list_on_all():
    """Every rank passes a scatter_list. Report: ValueError on ranks 1-3: only the source passes a list."""
    out = torch.zeros(2)
    dist.scatter(out, [torch.ones(2)] * 4, src=0)  # BUG
    return out.tolist()


@broken()
def scatter_list_short():
    """Rank 0 scatters 3 tensors to 4 ranks. Report: the list has 3, the group has 4 ranks, rank 0's line."""
    out = torch.zeros(2)
    dist.scatter(out, [torch.ones(2)] * 3 if dist.get_rank() == 0 else None, src=0)  # BUG
    return out.tolist()


@broken()
def gather_list_missing_on_root():
    """The root forgets the gather_list. Report: ValueError on rank 0 at this line; the others wait for it."""
    dist.gather(torch.ones(2), None, dst=0)  # BUG


@broken()
def gather_list_on_leaf():
    """All ranks pass a gather_list. Report: only dst may; ranks 1-3 raise."""
    dist.gather(torch.ones(2), [torch.zeros(2) for _ in range(4)], dst=0)  # BUG


@broken()
def all_gather_list_short():
    """The output list has world_size-1 tensors. Report: 3 outputs for 4 ranks."""
    dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size() - 1)], torch.ones(1))  # BUG


@broken()
def all_gather_into_too_small():
    """all_gather_into_tensor with an output of the size of the input. Report: output needs 4x input."""
    dist.all_gather_into_tensor(torch.zeros(2), torch.ones(2))  # BUG


@broken()
def reduce_scatter_indivisible():
    """reduce_scatter_tensor of 10 elements over 4 ranks with outputs of 2. Report: 10 is not 4 x 2."""
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(10))  # BUG


@broken()
def all_to_all_splits_disagree():
    """Rank 0 sends rank 1 three elements, rank 1 expects two. Report: pair (0,1) sends 3, expects 2."""
    r = dist.get_rank()
    ins = [3 if r == 0 and d == 1 else 2 for d in range(4)]
    x = torch.ones(sum(ins))
    y = torch.zeros(8)
    dist.all_to_all_single(y, x, [2] * 4, ins)  # BUG
    return y.tolist()


@broken()
def all_to_all_splits_wrong_sum():
    """Splits don't sum to the tensor's size on every rank. Report: splits sum 8, tensor has 9 rows."""
    dist.all_to_all_single(torch.zeros(9), torch.ones(9), [2] * 4, [2] * 4)  # BUG


@broken()
def grad_none_skipped():
    """Learner averages gradients of parameters that have one; rank 0's second layer has none. Report: rank 0's call 3
    differs from the others'."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])
    y = net[0](torch.ones(1, 3))
    if dist.get_rank() != 0:
        y = net[1](y)
    y.sum().backward()
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)  # BUG


@broken()
def dict_order_differs():
    """Every rank iterates its own dict order over gradients of different shapes. Report: call 1 is (2,) on even and (3,) on
    odd ranks."""
    d = {"w": torch.ones(2), "b": torch.ones(3)}
    for k in sorted(d, reverse=dist.get_rank() % 2 == 1):
        dist.all_reduce(d[k])  # BUG


@broken()
def async_order_differs():
    """Async all-reduces started in other orders. Report: shapes of call 1 differ; same order everywhere."""
    ts = [torch.ones(i + 1) for i in range(4)]
    idx = range(4) if dist.get_rank() else reversed(range(4))
    works = [dist.all_reduce(ts[i], async_op=True) for i in idx]  # BUG
    for w in works:
        w.wait()


@broken()
def all_reduce_numpy_like_list():
    """A learner all-reduces a python list. Report: TypeError, this line, needs a tensor."""
    dist.all_reduce([1.0, 2.0])  # BUG


@broken()
def bool_product_float_bitwise():
    """BAND of floats. Report: BAND needs integers, this line."""
    t = torch.ones(2)
    dist.all_reduce(t, op=dist.ReduceOp.BAND)  # BUG
    return t.tolist()


@broken()
def broadcast_shape_differs():
    """Workers allocate the buffer with the wrong shape (3,) for (4,). Report: shape mismatch: rank 0 (4,), others (3,)."""
    t = torch.arange(4.0) if dist.get_rank() == 0 else torch.zeros(3)
    dist.broadcast(t, 0)  # BUG
    return t.tolist()


@broken()
def broadcast_dtype_differs():
    """Rank 0 broadcasts int64, the others receive into float32. Report: dtype mismatch."""
    t = torch.arange(4) if dist.get_rank() == 0 else torch.zeros(4)
    dist.broadcast(t, 0)  # BUG
    return t.tolist()


@broken()
def barrier_in_rank0_save():
    """The save helper has a barrier inside and is called on rank 0 only. Report: rank 0 alone in barrier (line in save),
    others returned."""
    def save():
        dist.barrier()  # BUG
    if dist.get_rank() == 0:
        save()


@broken()
def one_barrier_too_many():
    """Rank 2 calls barrier twice. Report: rank 2 waits in its barrier number 2, the others have returned after 1."""
    dist.barrier()
    if dist.get_rank() == 2:
        dist.barrier()  # BUG


@broken()
def expanded_tensor():
    """Learner all-reduces an expanded (stride 0) tensor. Report: not contiguous/overlapping memory, line; or as gloo."""
    t = torch.ones(1).expand(4)
    dist.all_reduce(t)  # BUG
    return t.tolist()


@broken()
def forgot_wait_used_result():
    """Never waits for an async all-reduce and changes the tensor before a peer joins. Report: used before wait (handle of
    this line)."""
    t = torch.ones(2) * dist.get_rank()
    w = dist.all_reduce(t, async_op=True)  # BUG
    t += 100
    dist.barrier()
    del w
    return t.tolist()


# ---------------------------------------------------------------- point to point
@broken(n=2)
def both_send_first():
    """Two ranks send, then receive. Report: send/recv cycle; one must receive first or isend."""
    t, u = torch.ones(1), torch.zeros(1)
    dist.send(t, 1 - dist.get_rank())  # BUG
    dist.recv(u, 1 - dist.get_rank())


@broken(n=2)
def both_recv_first():
    """Two ranks receive first. Report: both wait in recv; nobody sends."""
    t, u = torch.ones(1), torch.zeros(1)
    dist.recv(u, 1 - dist.get_rank())  # BUG
    dist.send(t, 1 - dist.get_rank())


@broken()
def ring_wrong_neighbour():
    """Sends right, and receives from the right too. Report: rank r's recv from r+1, but r+1 sends to r+2; receive from r-1."""
    r, n = dist.get_rank(), 4
    u = torch.zeros(1)
    w = dist.isend(torch.ones(1), (r + 1) % n)
    dist.recv(u, (r + 1) % n)  # BUG
    w.wait()


@broken()
def pipeline_last_sends_on():
    """The last stage sends on to rank 0 (modulo), which never receives. Report: rank 3 waits in send to 0, which returned."""
    r = dist.get_rank()
    t = torch.zeros(2)
    if r > 0:
        dist.recv(t, r - 1)
    dist.send(t, (r + 1) % 4)  # BUG


@broken()
def pipeline_out_of_range():
    """The last stage sends to rank 4. Report: no rank 4 in a world of 4, this line."""
    r = dist.get_rank()
    t = torch.zeros(2)
    if r > 0:
        dist.recv(t, r - 1)
    dist.send(t, r + 1)  # BUG


@broken(n=2)
def tags_differ():
    """Sent with tag 1, received with tag 0. Report: rank 1 waits for tag 0, but rank 0 sends tag 1: same tag."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1, tag=1)
    else:
        dist.recv(torch.zeros(1), 0, tag=0)  # BUG


@broken(n=2)
def tags_out_of_order_blocking():
    """Blocking sends of tag 0 then 1, blocking receives of tag 1 then 0. Report: crossing tags."""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(t, 1, tag=0)
        dist.send(t, 1, tag=1)
    else:
        dist.recv(t, 0, tag=1)  # BUG
        dist.recv(t, 0, tag=0)


@broken(n=2)
def p2p_size_differs():
    """Sends 4, receives into 3. Report: sizes of the pair, both lines."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.zeros(3), 0)  # BUG


@broken(n=2)
def p2p_dtype_differs():
    """Sends float64, receives into float32 of twice the count. Report: dtype mismatch."""
    t = torch.zeros(4)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2, dtype=torch.float64), 1)
    else:
        dist.recv(t, 0)  # BUG
    return t.tolist()


@broken(n=2)
def one_recv_too_few():
    """Rank 0 sends three micro-batches, rank 1 takes two. Report: rank 0 waits in its third send; rank 1 returned."""
    for i in range(3):
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)  # BUG
        elif i < 2:
            dist.recv(torch.zeros(1), 0)


@broken(n=2)
def one_recv_too_many():
    """Rank 1 expects one more message. Report: rank 1 waits for a message from 0, which returned."""
    for i in range(3):
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1), 0)  # BUG
        elif i < 2:
            dist.send(torch.ones(1), 1)


@broken(n=2)
def send_to_self():
    """A rank sends to itself. Report: ValueError on this line: use a copy."""
    dist.send(torch.ones(1), dist.get_rank())  # BUG


@broken(n=2)
def isend_never_received():
    """isend nobody receives, and wait. Report: rank 0 waits for its isend (line of isend and wait); rank 1 returned."""
    if dist.get_rank() == 0:
        w = dist.isend(torch.ones(1), 1)  # BUG
        w.wait()


@broken(n=2)
def irecv_wait_before_isend():
    """Both post irecv and wait for it before they send. Report: both wait for irecv; send before wait."""
    u = torch.zeros(1)
    w = dist.irecv(u, 1 - dist.get_rank())
    w.wait()  # BUG
    dist.isend(torch.ones(1), 1 - dist.get_rank()).wait()


@broken()
def any_source_one_too_many():
    """The server receives from anyone four times, but there are three clients. Report: rank 0's 4th recv from any; others
    returned."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(4):
            dist.recv(t)  # BUG
    else:
        dist.send(t, 0)


@broken(n=2)
def batch_p2p_missing_partner():
    """batch_isend_irecv with a receive on both sides but a send only on rank 0. Report: rank 0 waits for rank 1's send,
    which rank 1 has not in its batch."""
    r = dist.get_rank()
    ops = [dist.P2POp(dist.irecv, torch.zeros(1), 1 - r)]
    if r == 0:
        ops.append(dist.P2POp(dist.isend, torch.ones(1), 1 - r))
    for w in dist.batch_isend_irecv(ops):
        w.wait()  # BUG


@broken(n=2)
def batch_p2p_wrong_size():
    """Halo exchange where rank 1 sends one column too many. Report: (5,) against (4,)."""
    r = dist.get_rank()
    ops = [dist.P2POp(dist.isend, torch.ones(4 + r), 1 - r), dist.P2POp(dist.irecv, torch.zeros(4), 1 - r)]
    for w in dist.batch_isend_irecv(ops):  # BUG
        w.wait()


@broken(n=2)
def batch_empty():
    """batch_isend_irecv with an empty list at the border. Report: the list is empty, this line (as torch: ValueError/assert)."""
    return dist.batch_isend_irecv([])  # BUG


@broken(n=2)
def p2pop_wrong_function():
    """P2POp with dist.send instead of dist.isend. Report: ValueError: isend or irecv."""
    dist.P2POp(dist.send, torch.ones(1), 1 - dist.get_rank())  # BUG


@broken()
def onef1b_wrong_warmup():
    """Stage 0 sends all forward first, stage 1 begins with backward sends: blocking cycle between neighbours. Report: 0
    waits in send (2nd), 1 in send back."""
    r = dist.get_rank()
    t = torch.zeros(1)
    if r == 0:
        for _ in range(2):
            dist.send(t, 1)  # BUG
        for _ in range(2):
            dist.recv(t, 1)
    elif r == 1:
        for _ in range(2):
            dist.recv(t, 0)
            dist.send(t, 0)


@broken()
def allreduce_while_peer_recv():
    """Rank 1 expects rank 0's weights by recv, rank 0 has begun all_reduce already. Report: rank 1 in recv from 0; 0,2,3 in
    all_reduce; rank 0 should send first."""
    t = torch.zeros(2)
    if dist.get_rank() == 1:
        dist.recv(t, 0)  # BUG
    dist.all_reduce(t)
    if dist.get_rank() == 0:
        dist.send(t, 1)


# ---------------------------------------------------------------- groups
@broken()
def new_group_members_only_then_another():
    """Ranks 0,1 make a group of their own first, then all make a second one: the counts differ and the second has another
    name. Report: new_group call 1 is [0,1] on ranks 0,1 and [0..3] on 2,3: every rank must call new_group."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1])  # BUG
    g = dist.new_group([0, 1, 2, 3])
    t = torch.ones(1)
    dist.all_reduce(t, group=g)
    return t.item()


@broken()
def new_group_rank0_only():
    """Only rank 0 makes a group of all. Report: rank 0 waits in new_group for 1-3, which returned."""
    if dist.get_rank() == 0:
        dist.new_group([0, 1, 2, 3])  # BUG


@broken()
def new_groups_in_other_order():
    """Ranks create two groups in a rank-dependent order. Report: new_group call 1 has other ranks on 2,3."""
    lists = [[0, 1], [2, 3]]
    if dist.get_rank() >= 2:
        lists.reverse()
    gs = {tuple(x): dist.new_group(x) for x in lists}  # BUG
    mine = gs[(0, 1) if dist.get_rank() < 2 else (2, 3)]
    t = torch.ones(1)
    dist.all_reduce(t, group=mine)
    return t.item()


@broken()
def non_member_calls():
    """All ranks all-reduce in a group of two. Report: ranks 2,3 are not in the group (torch: warning, no result), then
    assertion; line."""
    g = dist.new_group([0, 1])
    t = torch.ones(1)
    dist.all_gather([torch.zeros(1)] * dist.get_world_size(g), t, group=g)  # BUG
    dist.all_reduce(t, group=g)
    assert t.item() == 2.0, t


@broken()
def group_rank_as_src():
    """Broadcast within [2,3] from src=0 meant as the group rank. Report: global rank 0 is not in the group; src=2 or
    group_src=0."""
    g = dist.new_group([2, 3])
    t = torch.ones(1)
    if dist.get_rank() >= 2:
        dist.broadcast(t, src=0, group=g)  # BUG


@broken()
def group_send_world_rank_confusion():
    """send(dst=1) in group [2,3] meant as the group rank. Report: global rank 1 not in the group."""
    g = dist.new_group([2, 3])
    t = torch.ones(1)
    if dist.get_rank() == 2:
        dist.send(t, 1, group=g)  # BUG
    elif dist.get_rank() == 3:
        dist.recv(t, 0, group=g)  # BUG: the same


@broken()
def send_in_group_recv_in_world():
    """Sends in a subgroup, receives in the world. Report: same peers, other group; the receive must name the group."""
    g = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1, group=g)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)  # BUG


@broken()
def crossing_groups():
    """Row then column groups; rank 3 does column first: a cycle over groups. Report: 3 waits in col, its column partner
    in row...; same order."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cols = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    r = dist.get_rank()
    order = [rows[r // 2], cols[r % 2]]
    if r in (0, 3):
        order.reverse()
    t = torch.ones(1)
    for g in order:
        dist.all_reduce(t, group=g)  # BUG


@broken()
def world_instead_of_group():
    """Ranks 0,1 all-reduce in their group, ranks 2,3 forget group=. Report: ranks 2,3 use the world."""
    g = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    t = torch.ones(1)
    if dist.get_rank() < 2:
        dist.all_reduce(t, group=g)
    else:
        dist.all_reduce(t)  # BUG


@broken()
def missing_in_subgroup():
    """Rank 1 of group [0,1] skips the group's barrier. Report: rank 0 waits in barrier of [0,1] for 1, which returned."""
    g = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.barrier(group=g)  # BUG


@broken()
def duplicate_ranks_in_group():
    """new_group([0, 0, 1]). Report: duplicate rank 0."""
    dist.new_group([0, 0, 1])  # BUG


@broken()
def group_rank_out_of_world():
    """new_group([2,3,4]) of a world of 4. Report: rank 4 doesn't exist."""
    dist.new_group([2, 3, 4])  # BUG


@broken()
def destroyed_world_used():
    """Destroys the world and then logs with a barrier. Report: no process group any more, line."""
    dist.barrier()
    dist.destroy_process_group()
    dist.barrier()  # BUG


@broken()
def one_rank_destroys_early():
    """Rank 3 destroys its group while others all-reduce. Report: rank 3 has left (destroy line), others wait."""
    if dist.get_rank() == 3:
        dist.destroy_process_group()  # BUG
        return
    dist.all_reduce(torch.ones(1))


@broken()
def new_subgroups_wrong_size():
    """new_subgroups(3) with 4 ranks. Report: 4 is not divisible by 3."""
    dist.new_subgroups(group_size=3)  # BUG


@broken()
def enumeration_overlaps():
    """new_subgroups_by_enumeration with overlapping lists. Report: rank 1 twice."""
    dist.new_subgroups_by_enumeration([[0, 1], [1, 2, 3]])  # BUG


@broken()
def init_twice():
    """init_process_group a second time. Report: ValueError on all ranks: initialised twice."""
    dist.init_process_group("gloo")  # BUG


# ---------------------------------------------------------------- exceptions
@broken()
def one_rank_raises():
    """Rank 2 fails on bad data. Report: rank 2's ValueError with its line first; others waited in all_reduce."""
    if dist.get_rank() == 2:
        raise ValueError("bad sample")  # BUG
    dist.all_reduce(torch.ones(1))


@broken()
def swallowed_and_returned():
    """Rank 2 swallows its error and goes on without the all-reduce. Report: rank 2 returned; caught ValueError at line X."""
    try:
        if dist.get_rank() == 2:
            raise ValueError("bad sample")  # BUG
        dist.all_reduce(torch.ones(1))
    except Exception:
        pass


@broken()
def swallowed_in_loop():
    """Rank 1 skips a bad batch (continue), so its calls shift by one. Report: rank 1 made 2 calls of 3; caught error named."""
    for step in range(3):
        try:
            x = torch.ones(1) / (1 if not (step == 1 and dist.get_rank() == 1) else int("x"))  # BUG
        except ValueError:
            continue
        dist.all_reduce(x)


@broken()
def swallowed_bare_except_all():
    """All collectives in a bare except; rank 0 passes a wrong shape for its op. Report: mismatch should not be hidden by the
    except."""
    try:
        dist.all_reduce(torch.ones(3 if dist.get_rank() else 2))  # BUG
    except:  # noqa: E722
        pass
    return "fine"


@broken()
def swallowed_retry_forever():
    """Retries a failing collective for ever. Report: mismatch at the all_reduce, rank 0."""
    while True:
        try:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)  # BUG
            if dist.get_rank() == 0:
                raise RuntimeError("again")
            return "ok"
        except RuntimeError:
            time.sleep(0.01)


@broken()
def finally_with_barrier():
    """A finally block with a barrier hides an error of rank 1: the others wait in all_reduce. Report: rank 1's
    ZeroDivisionError is pending while it waits in barrier."""
    try:
        if dist.get_rank() == 1:
            1 / 0  # BUG
        dist.all_reduce(torch.ones(1))
    finally:
        dist.barrier()


@broken()
def except_reports_to_rank0():
    """On error a rank sends the message to rank 0, which waits in all_reduce. Report: rank 3's send to 0 (after caught
    KeyError) against rank 0's all_reduce."""
    try:
        if dist.get_rank() == 3:
            {}["missing"]  # BUG
        dist.all_reduce(torch.ones(1))
    except KeyError:
        dist.send(torch.ones(1), 0)


@broken()
def sys_exit_on_one():
    """Rank 1 calls sys.exit(0) when it has finished early. Report: rank 1 exited at line; the others wait."""
    import sys
    if dist.get_rank() == 1:
        sys.exit(0)  # BUG
    dist.barrier()


@broken()
def os_exit_on_one():
    """Rank 1 calls os._exit(1). Report: rank 1 ended with os._exit at this line (and the simulator's process survives)."""
    if dist.get_rank() == 1:
        os._exit(1)  # BUG
    dist.barrier()


@broken()
def assertion_after_collective():
    """A wrong average: forgot to divide. Report: AssertionError on each rank, this line."""
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == 1.0, f"average is {t.item()}"  # BUG


@broken()
def infinite_recursion():
    """Recursion without end on rank 0. Report: RecursionError, rank 0, line."""
    def f(n):
        return f(n + 1)  # BUG
    if dist.get_rank() == 0:
        f(0)
    dist.barrier()


@broken()
def keyboard_interrupt_on_one():
    """Rank 0 raises KeyboardInterrupt. Report: rank 0 KeyboardInterrupt line, and the caller isn't itself interrupted."""
    if dist.get_rank() == 0:
        raise KeyboardInterrupt  # BUG
    dist.barrier()


# ---------------------------------------------------------------- threads of a rank
@broken(n=2)
def heartbeat_thread_outlives_main():
    """A heartbeat thread all-reduces for ever on its own group; rank 1's main stops its heartbeat first. Report: rank 0's
    heartbeat thread waits in all_reduce for rank 1, whose heartbeat has ended."""
    g = dist.new_group([0, 1])
    stop = threading.Event()
    def beat():
        while not stop.is_set():
            dist.all_reduce(torch.ones(1), group=g)  # BUG
            time.sleep(0.01)
    th = threading.Thread(target=beat)
    th.start()
    if dist.get_rank() == 1:
        time.sleep(0.055)
    else:
        time.sleep(0.25)
    stop.set()
    th.join()


@broken(n=2)
def two_threads_one_group():
    """Two threads of a rank share the world: on rank 1 their collectives come in the other order. Report: mismatch on call
    1, thread names; give each thread its own group."""
    def a():
        dist.all_reduce(torch.ones(2))  # BUG
    def b():
        dist.all_reduce(torch.ones(3))  # BUG
    order = [a, b] if dist.get_rank() == 0 else [b, a]
    ths = []
    for f in order:
        th = threading.Thread(target=f)
        th.start()
        ths.append(th)
        time.sleep(0.05)
    for th in ths:
        th.join()


@broken(n=2)
def thread_exception_lost():
    """The sender thread of rank 0 dies of a KeyError, rank 1 waits for its message. Report: rank 1 waits in recv; rank 0's
    thread 'sender' died: KeyError at this line."""
    def sender():
        d = {}
        dist.send(d["grad"], 1)  # BUG
    if dist.get_rank() == 0:
        th = threading.Thread(target=sender, name="sender")
        th.start()
        th.join()
    else:
        dist.recv(torch.zeros(1), 0)


@broken(n=2)
def prefetch_queue_full():
    """Prefetcher puts more batches than the bounded queue holds, consumer stops early and joins it. Report: rank's main
    waits in join; thread 'prefetch' waits in put of a full queue of 2."""
    q = queue.Queue(maxsize=2)
    def prefetch():
        for i in range(6):
            q.put(i)  # BUG
    th = threading.Thread(target=prefetch, name="prefetch")
    th.start()
    got = [q.get() for _ in range(3)]
    th.join()
    return got


@broken(n=2)
def queue_without_sentinel():
    """The consumer thread waits for a sentinel that only rank 0 puts. Report: rank 1: thread 'consumer' in queue.get, main in
    join."""
    q = queue.Queue()
    got = []
    def consumer():
        while (x := q.get()) is not None:  # BUG
            got.append(x)
    th = threading.Thread(target=consumer, name="consumer")
    th.start()
    q.put(1)
    if dist.get_rank() == 0:
        q.put(None)
    th.join()
    dist.barrier()
    return got


@broken(n=2)
def lock_held_during_collective():
    """Main holds a lock and all-reduces; on rank 1 the sender thread needs the lock first, rank 0's main waits for its
    message before the all-reduce. Report: rank 1: main holds lock in all_reduce, thread waits for the lock."""
    lock = threading.Lock()
    g = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1, group=g)
        dist.all_reduce(torch.ones(1))
    else:
        def push():
            with lock:  # BUG
                dist.send(torch.ones(1), 0, group=g)
        with lock:
            th = threading.Thread(target=push)
            th.start()
            dist.all_reduce(torch.ones(1))
        th.join()


@broken(n=2)
def lock_order_inverted():
    """Two threads of a rank take two locks in opposite order. Report: rank, both threads, both locks/lines."""
    a, b = threading.Lock(), threading.Lock()
    def first():
        with a:
            time.sleep(0.02)
            with b:  # BUG
                pass
    def second():
        with b:
            time.sleep(0.02)
            with a:  # BUG
                pass
    ths = [threading.Thread(target=first), threading.Thread(target=second)]
    for t in ths:
        t.start()
    for t in ths:
        t.join()
    dist.barrier()


@broken(n=2)
def event_never_set():
    """Rank 1 waits for an event that its receiver thread sets only for tag 7; rank 0 sends tag 8. Report: thread waits for
    tag 7, rank 0 sends tag 8, main waits for the event."""
    ev = threading.Event()
    if dist.get_rank() == 1:
        def rx():
            dist.recv(torch.zeros(1), 0, tag=7)  # BUG
            ev.set()
        threading.Thread(target=rx, daemon=True).start()
        ev.wait()
    else:
        dist.send(torch.ones(1), 1, tag=8)


@broken(n=2)
def condition_without_notify():
    """A consumer waits on a condition nobody notifies. Report: rank r waits in Condition.wait, line."""
    c = threading.Condition()
    items = []
    def consumer():
        with c:
            while not items:
                c.wait()  # BUG
    th = threading.Thread(target=consumer)
    th.start()
    time.sleep(0.01)
    with c:
        items.append(1)
    th.join()


@broken(n=2)
def semaphore_leak():
    """In-flight limit of 2 isends with a semaphore that nobody releases. Report: rank 0 waits in acquire (line); rank 1 in
    its third recv."""
    sem = threading.Semaphore(2)
    for i in range(3):
        if dist.get_rank() == 0:
            sem.acquire()  # BUG
            dist.isend(torch.ones(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)


@broken(n=2)
def thread_barrier_wrong_parties():
    """threading.Barrier(3) with two threads. Report: rank, both threads wait in Barrier with 2 of 3."""
    bar = threading.Barrier(3)
    th = threading.Thread(target=bar.wait)
    th.start()
    bar.wait()  # BUG
    th.join()


@broken()
def server_thread_per_client_one_dead():
    """Parameter server with a thread per client; client 3 sends nothing. Report: rank 0's thread for client 3 waits in recv
    from 3, which returned."""
    if dist.get_rank() == 0:
        def serve(c):
            t = torch.zeros(1)
            dist.recv(t, c)  # BUG
            dist.send(t + 1, c)
        ths = [threading.Thread(target=serve, args=(c,), name=f"serve-{c}") for c in (1, 2, 3)]
        [t.start() for t in ths]
        [t.join() for t in ths]
    elif dist.get_rank() < 3:
        t = torch.ones(1)
        dist.send(t, 0)
        dist.recv(t, 0)


@broken()
def server_reply_to_wrong_client():
    """The server's closure captures the loop variable late: every thread serves client 3. Report: rank 0's three threads all
    recv from 3; 1 and 2 wait in send."""
    if dist.get_rank() == 0:
        go = threading.Event()
        def serve():
            go.wait()
            t = torch.zeros(1)
            dist.recv(t, c)  # BUG
        ths = []
        for c in (1, 2, 3):
            ths.append(threading.Thread(target=serve))
            ths[-1].start()
        go.set()
        [t.join() for t in ths]
    else:
        dist.send(torch.ones(1), 0)


@broken(n=2)
def async_save_future_deadlock():
    """Saves in a pool of one worker; the save submits its own upload to the same pool and waits. Report: rank r: worker waits
    for a future that the same pool must run."""
    pool = ThreadPoolExecutor(1)
    def upload():
        return 1
    def save():
        return pool.submit(upload).result()  # BUG
    f = pool.submit(save)
    f.result()
    dist.barrier()


@broken(n=2)
def async_save_error_unseen():
    """The asynchronous save on rank 0 fails before its barrier; nobody looks at the future. Report: rank 1's saver waits in
    barrier; rank 0's saver raised OSError at this line."""
    g = dist.new_group([0, 1])
    pool = ThreadPoolExecutor(1)
    def save():
        if dist.get_rank() == 0:
            open("/nonexistent/dir/ckpt")  # BUG
        dist.barrier(group=g)
    pool.submit(save)
    pool.shutdown()


@broken(n=2)
def pool_exhausted():
    """Pool of one runs recv first, then the send the peer waits for. Report: each rank's worker waits in recv, its send is
    queued behind it."""
    pool = ThreadPoolExecutor(1)
    peer = 1 - dist.get_rank()
    fs = [pool.submit(dist.recv, torch.zeros(1), peer), pool.submit(dist.send, torch.ones(1), peer)]  # BUG
    [f.result() for f in fs]


@broken(n=2)
def join_forgotten_daemon_sender():
    """A daemon thread's send is cut off because main returns at once on rank 0. Report: rank 1 waits in recv; rank 0 returned
    while its daemon thread slept before the send."""
    if dist.get_rank() == 0:
        def later():
            time.sleep(0.5)
            dist.send(torch.ones(1), 1)
        threading.Thread(target=later, daemon=True).start()  # BUG
    else:
        dist.recv(torch.zeros(1), 0)
    return "done"


@broken(n=2)
def main_and_thread_recv_same():
    """Main and a thread both receive from rank 0, which sends once. Report: rank 1 has two receivers (thread and main), one
    message."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        th = threading.Thread(target=lambda: dist.recv(torch.zeros(1), 0))
        th.start()
        dist.recv(torch.zeros(1), 0)  # BUG
        th.join()


@broken(n=2)
def timer_never_cancelled():
    """A repeating threading.Timer that all-reduces on rank 0 only. Report: rank 0's timer thread waits in all_reduce for rank
    1, which waits in barrier / returned."""
    g = dist.new_group([0, 1])
    def tick():
        dist.all_reduce(torch.ones(1), group=g)  # BUG
    if dist.get_rank() == 0:
        t = threading.Timer(0.01, tick)
        t.start()
        t.join()
    dist.barrier()


@broken(n=2)
def thread_in_thread_join_self_cycle():
    """Two threads join each other. Report: rank, both in join."""
    ths = {}
    go = threading.Event()
    def f(other):
        go.wait()
        ths[other].join()  # BUG
    ths["a"] = threading.Thread(target=f, args=("b",), name="a")
    ths["b"] = threading.Thread(target=f, args=("a",), name="b")
    ths["a"].start(); ths["b"].start()
    go.set()
    ths["a"].join()


# ---------------------------------------------------------------- polls
@broken(n=2)
def poll_is_completed_forever():
    """Busy loop until an irecv is completed, that nobody sends. Report: rank 1 polls is_completed() of its irecv from 0
    (line); rank 0 returned."""
    if dist.get_rank() == 1:
        w = dist.irecv(torch.zeros(1), 0)
        while not w.is_completed():  # BUG
            pass


@broken(n=2)
def poll_is_completed_with_sleep():
    """The same with a sleep. Report: the same."""
    if dist.get_rank() == 1:
        w = dist.irecv(torch.zeros(1), 0)
        while not w.is_completed():
            time.sleep(0.001)  # BUG


@broken()
def poll_all_reduce_missing_rank():
    """Ranks 0-2 poll an async all-reduce that rank 3 doesn't call. Report: 0-2 poll all_reduce at this line for rank 3,
    returned."""
    if dist.get_rank() < 3:
        w = dist.all_reduce(torch.ones(1), async_op=True)
        while not w.is_completed():  # BUG
            time.sleep(0)


@broken(n=2)
def poll_store_check():
    """Rank 1 polls store.check for a key with a typo. Report: rank 1 polls check(['redy']) ; 'ready' exists."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("ready", "1")
    else:
        while not store.check(["redy"]):  # BUG
            time.sleep(0.01)
    dist.barrier()


@broken(n=2)
def poll_store_check_busy():
    """The same without a sleep. Report: the same."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("ready", "1")
    else:
        while not store.check(["redy"]):  # BUG
            pass
    dist.barrier()


@broken(n=2)
def poll_flag_never_set():
    """Main spins on a Python flag that its thread sets after a recv that never comes. Report: thread in recv from rank 0;
    main spins at this line."""
    done = []
    if dist.get_rank() == 1:
        def rx():
            dist.recv(torch.zeros(1), 0)  # BUG
            done.append(1)
        threading.Thread(target=rx, daemon=True).start()
        while not done:
            time.sleep(0.01)


@broken(n=2)
def poll_file_flag():
    """Rank 1 waits for a file that rank 0 never writes. Report: rank 1 loops at this line (os.path.exists); rank 0 in
    barrier."""
    import tempfile
    path = os.path.join(tempfile.gettempdir(), f"never-{os.getpid()}")
    if dist.get_rank() == 1:
        while not os.path.exists(path):  # BUG
            time.sleep(0.05)
    dist.barrier()


@broken(n=2)
def poll_queue_get_nowait():
    """Consumer spins on get_nowait for an item its dead producer never puts. Report: rank loops at this line."""
    q = queue.Queue()
    th = threading.Thread(target=lambda: None)
    th.start()
    while True:
        try:
            q.get_nowait()  # BUG
            break
        except queue.Empty:
            time.sleep(0.01)
    dist.barrier()


@broken(n=2, timeout=8)
def busy_loop_pure():
    """Rank 0 computes for ever without a call. Report: rank 0 busy at this line after the limit; rank 1 in barrier."""
    if dist.get_rank() == 0:
        n = 0
        while n >= 0:  # BUG: or this line of the same loop, when the time is up
            n += 1  # BUG
    dist.barrier()


@broken(n=2)
def poll_queue_get_timeout_forever():
    """Consumer retries get(timeout=0.1) for ever. Report: rank loops at this line; the queue's producer is gone."""
    q = queue.Queue()
    while True:
        try:
            q.get(timeout=0.1)  # BUG
            break
        except queue.Empty:
            continue
    dist.barrier()


@broken(n=2)
def poll_counter_add():
    """Waits until a store counter reaches 3 with 2 ranks. Report: counter is 2, both ranks poll add(key,0) at this line."""
    store = dist.distributed_c10d._get_default_store()
    store.add("n", 1)
    while store.add("n", 0) < 3:  # BUG
        time.sleep(0.01)


@broken(n=2)
def poll_future_done():
    """Polls done() of the future of an all-reduce that rank 1 doesn't make. Report: rank 0 polls; rank 1 returned."""
    if dist.get_rank() == 0:
        f = dist.all_reduce(torch.ones(1), async_op=True).get_future()  # BUG
        while not f.done():
            time.sleep(0.01)


@broken(n=2)
def poll_thread_is_alive():
    """Polls th.is_alive() while the thread waits for a message. Report: thread's recv line; rank 0 returned."""
    if dist.get_rank() == 1:
        th = threading.Thread(target=dist.recv, args=(torch.zeros(1), 0), daemon=True)
        th.start()
        while th.is_alive():  # BUG
            time.sleep(0.01)


# ---------------------------------------------------------------- time limits
@broken(n=2)
def wait_timedelta_expires():
    """work.wait(2 s) on a receive nobody sends; the error isn't caught. Report: rank 1's wait of 2 s expired at this line;
    rank 0 returned without sending."""
    if dist.get_rank() == 1:
        dist.irecv(torch.zeros(1), 0).wait(timedelta(seconds=2))  # BUG


@broken(n=2)
def store_wait_expires():
    """store.wait with 1 s on a missing key. Report: DistStoreError/timeout at this line naming the key, rank 1."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["model"], timedelta(seconds=1))  # BUG


@broken(n=2)
def store_get_never_set():
    """store.get of a key that nobody sets. Report: rank 1 waits in get('lr') at this line; rank 0 waits in barrier."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("lr")  # BUG
    dist.barrier()


@broken()
def monitored_barrier_missing():
    """monitored_barrier with rank 2 missing. Report: rank 2 didn't call monitored_barrier (it returned)."""
    if dist.get_rank() != 2:
        dist.monitored_barrier(timeout=timedelta(seconds=2))  # BUG


@broken(n=2)
def new_group_timeout_expires():
    """A group with a time limit of 1 s; rank 1 sleeps 3 s (a long evaluation) before the all-reduce. Report: rank 0's
    all_reduce exceeded the group's 1 s since rank 1 came after 3 s."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)  # BUG
    t = torch.ones(1)
    dist.all_reduce(t, group=g)
    return t.item()


@broken(n=2)
def long_sleep_before_barrier():
    """Rank 1 sleeps longer than the 30 min default. Report: rank 0's barrier exceeds 30 min (virtual time), rank 1 sleeps
    3600 s at this line."""
    if dist.get_rank() == 1:
        time.sleep(3600)  # BUG
    dist.barrier()


@broken(n=2)
def recv_timeout_retry_forever():
    """Retries a store.wait with a short limit for ever. Report: rank 1 loops at this line waiting for key 'go'."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        while True:
            try:
                store.wait(["go"], timedelta(milliseconds=100))  # BUG
                break
            except RuntimeError:
                continue
    dist.barrier()


@broken(n=2)
def event_wait_timeout_ignored():
    """ev.wait(timeout=1) returns False, ignored; uses the unreceived tensor. Report: assertion error at rank 1's line."""
    ev, t = threading.Event(), torch.zeros(1)
    def rx():
        dist.recv(t, 0)
        ev.set()
    if dist.get_rank() == 1:
        threading.Thread(target=rx, daemon=True).start()
        ev.wait(timeout=1)
        assert t.item() == 5.0, "weights have not arrived"  # BUG
    else:
        time.sleep(2)
        dist.send(torch.full((1,), 5.0), 1)


# ---------------------------------------------------------------- coalesced
@broken()
def coalescing_manager_count_differs():
    """Coalesced all-reduces: 3 on rank 0, 2 elsewhere. Report: rank 0 coalesces 3, others 2, line."""
    ts = [torch.ones(2) for _ in range(3 if dist.get_rank() == 0 else 2)]
    with dist.distributed_c10d._coalescing_manager():  # BUG
        for t in ts:
            dist.all_reduce(t)
    return [t.tolist() for t in ts]


@broken()
def all_reduce_coalesced_shapes():
    """all_reduce_coalesced with lists in another order. Report: first tensor (2,) vs (3,)."""
    ts = [torch.ones(2), torch.ones(3)]
    if dist.get_rank() == 1:
        ts.reverse()
    dist.all_reduce_coalesced(ts)  # BUG
    return [t.tolist() for t in ts]


@broken()
def all_reduce_coalesced_vs_loop():
    """Rank 0 coalesces, others loop. Report: all_reduce_coalesced of 2 tensors on rank 0, all_reduce elsewhere."""
    ts = [torch.ones(2), torch.ones(2)]
    if dist.get_rank() == 0:
        dist.all_reduce_coalesced(ts)  # BUG
    else:
        for t in ts:
            dist.all_reduce(t)


@broken(n=2)
def coalescing_async_never_waited():
    """An async coalescing manager on rank 0 only. Report: rank 0 waits in cm.wait() for rank 1."""
    if dist.get_rank() == 0:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as cm:
            dist.all_reduce(torch.ones(1))  # BUG
        cm.wait()


@broken(n=2)
def batch_mixed_groups():
    """batch_isend_irecv of ops in two groups. Report: ValueError: all ops of one group."""
    g = dist.new_group([0, 1])
    p = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, torch.ones(1), p), dist.P2POp(dist.irecv, torch.zeros(1), p, group=g)]
    [w.wait() for w in dist.batch_isend_irecv(ops)]  # BUG


# ---------------------------------------------------------------- objects
@broken()
def broadcast_object_list_lengths():
    """broadcast_object_list with lists of different lengths. Report: rank 0 broadcasts 2 objects, others expect 3."""
    objs = ["a", "b"] if dist.get_rank() == 0 else [None] * 3
    dist.broadcast_object_list(objs, src=0)  # BUG
    return objs


@broken()
def all_gather_object_unpicklable():
    """Gathers a lambda on rank 1. Report: rank 1 PicklingError at this line; others wait."""
    out = [None] * 4
    dist.all_gather_object(out, (lambda: 1) if dist.get_rank() == 1 else 1)  # BUG
    return out


@broken()
def gather_object_on_rank0_only():
    """gather_object called on the root only. Report: rank 0 waits in gather_object; 1-3 returned."""
    if dist.get_rank() == 0:
        dist.gather_object({"a": 1}, [None] * 4, dst=0)  # BUG


@broken()
def all_gather_object_short_list():
    """Output list of 3 for 4 ranks. Report: the list has 3, the group 4."""
    out = [None] * 3
    dist.all_gather_object(out, dist.get_rank())  # BUG
    return out


@broken()
def object_against_tensor():
    """Rank 0 broadcasts an object, others a tensor. Report: broadcast_object_list on 0, broadcast elsewhere."""
    if dist.get_rank() == 0:
        dist.broadcast_object_list([1], 0)  # BUG
    else:
        dist.broadcast(torch.zeros(1), 0)


@broken()
def scatter_object_short():
    """scatter_object_list of three objects for four ranks. Report: 3 objects, 4 ranks; rank 0's line."""
    out = [None]
    dist.scatter_object_list(out, [1, 2, 3] if dist.get_rank() == 0 else None, src=0)  # BUG
    return out


@broken(n=2)
def send_object_recv_tensor():
    """send_object_list against recv of a tensor. Report: the sender sends the sizes (int64) first: object against tensor."""
    if dist.get_rank() == 0:
        dist.send_object_list([{"lr": 1}], 1)  # BUG
    else:
        dist.recv(torch.zeros(1), 0)


# ---------------------------------------------------------------- DDP, FSDP, mesh, functional, pipelining, dcp
@broken()
def ddp_on_rank0_only():
    """Only rank 0 wraps in DDP. Report: rank 0 waits in DDP(...) at this line for the others."""
    net = nn.Linear(2, 2)
    if dist.get_rank() == 0:
        net = DDP(net)  # BUG
    net(torch.ones(1, 2)).sum().backward()


@broken()
def ddp_other_model():
    """Rank 3 has another number of outputs. Report: DDP: parameter shapes differ, rank 3, this line."""
    DDP(nn.Linear(2, 3 if dist.get_rank() == 3 else 2))  # BUG


@broken()
def ddp_uneven_steps():
    """DDP with one step more on rank 0. Report: rank 0 waits in backward (this line) for others which have returned;
    join()."""
    net = DDP(nn.Linear(2, 2))
    for _ in range(2 + (dist.get_rank() == 0)):
        net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_unused_parameter():
    """A parameter gets no gradient: the second forward raises. Report: RuntimeError names the unused parameter /
    find_unused_parameters, line of forward."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.a(x)
    net = DDP(Net())
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_branch_per_rank():
    """Ranks use other branches without find_unused_parameters. Report: which rank lacks which parameter's gradient; line."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.a(x) if dist.get_rank() == 0 else self.b(x)
    net = DDP(Net())
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_validation_on_rank0_with_buffers():
    """Validation through the DDP module with BatchNorm in train mode on rank 0 only: broadcasts buffers. Report: rank 0 waits in
    forward (buffer broadcast) at this line, others returned; use net.module / eval."""
    net = DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    net(torch.ones(4, 2)).sum().backward()
    if dist.get_rank() == 0:
        net(torch.ones(4, 2))  # BUG


@broken()
def ddp_no_sync_on_one():
    """Rank 1 accumulates with no_sync in the step in which others synchronise. Report: 0,2,3 wait in backward for rank 1."""
    from contextlib import nullcontext
    net = DDP(nn.Linear(2, 2))
    with (net.no_sync() if dist.get_rank() == 1 else nullcontext()):
        net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_nan_skip():
    """Rank 2 skips backward because its loss is NaN. Report: 0,1,3 wait in backward for rank 2, which is in barrier."""
    net = DDP(nn.Linear(2, 2))
    loss = net(torch.full((1, 2), float("nan") if dist.get_rank() == 2 else 1.0)).sum()
    if not torch.isnan(loss):
        loss.backward()  # BUG
    dist.barrier()


@broken()
def ddp_extra_reduce_in_loss():
    """Rank 0 all-reduces the loss between forward and backward for its log. Report: rank 0's all_reduce at this line against
    the gradient all_reduce of DDP's backward on others."""
    net = DDP(nn.Linear(2, 2))
    loss = net(torch.ones(1, 2)).sum()
    if dist.get_rank() == 0:
        dist.all_reduce(loss.detach())  # BUG
    loss.backward()


@broken(n=2)
def ddp_comm_hook_no_future():
    """A comm hook that returns the tensor instead of a future. Report: TypeError/RuntimeError, hook's line."""
    net = DDP(nn.Linear(2, 2))
    def hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
        return bucket.buffer()
    net.register_comm_hook(None, hook)
    net(torch.ones(1, 2)).sum().backward()  # BUG


@broken(n=2)
def ddp_hook_future_never_set():
    """A comm hook returns a future that nobody completes. Report: both ranks wait in backward for the hook's future (line)."""
    net = DDP(nn.Linear(2, 2))
    def hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()  # BUG
    net.register_comm_hook(None, hook)
    net(torch.ones(1, 2)).sum().backward()


@broken()
def syncbn_one_rank_eval():
    """A hand-made SyncBatchNorm all-reduces statistics in training; rank 3 is in eval mode. Report: 0-2 wait in all_reduce
    (line in forward); 3 in barrier."""
    class BN(nn.Module):
        def forward(self, x):
            if self.training:
                m = x.mean()
                dist.all_reduce(m)  # BUG
                x = x - m / 4
            return x
    net = BN()
    net.train(dist.get_rank() != 3)
    net(torch.ones(2))
    dist.barrier()


@broken()
def fsdp_forward_on_rank0_only():
    """fully_shard, then only rank 0 runs an evaluation forward. Report: rank 0 waits in all-gather of forward at this line;
    others returned."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    if dist.get_rank() == 0:
        net(torch.ones(1, 8))  # BUG


@broken()
def fsdp_unequal_micro_batches():
    """fully_shard, rank 0 makes two forward/backward, the others one. Report: rank 0 waits in forward 2 at this line."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    for _ in range(2 if dist.get_rank() == 0 else 1):
        net(torch.ones(1, 8)).sum().backward()  # BUG


@broken()
def fsdp_state_dict_rank0():
    """Full state dict gathered on rank 0 only. Report: rank 0 waits in full_tensor() (this line); others at barrier."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    if dist.get_rank() == 0:
        {k: v.full_tensor() for k, v in net.state_dict().items()}  # BUG
    dist.barrier()


@broken()
def mesh_wrong_size():
    """init_device_mesh (2,3) in a world of 4. Report: 6 != 4 at this line."""
    from torch.distributed.device_mesh import init_device_mesh
    init_device_mesh("cpu", (2, 3))  # BUG


@broken()
def mesh_on_rank0_only():
    """Only rank 0 builds a mesh of 2x2. Report: rank 0 waits in init_device_mesh at this line for others."""
    from torch.distributed.device_mesh import init_device_mesh
    if dist.get_rank() == 0:
        init_device_mesh("cpu", (2, 2))  # BUG
    dist.barrier()


@broken()
def mesh_dims_swapped():
    """Ranks 0 and 3 take tp before dp. Report: a cycle over the four pairs; same order everywhere."""
    from torch.distributed.device_mesh import init_device_mesh
    m = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    t = torch.ones(1)
    names = ["dp", "tp"]
    if dist.get_rank() in (0, 3):
        names.reverse()
    for nme in names:
        dist.all_reduce(t, group=m.get_group(nme))  # BUG


@broken()
def mesh_unknown_name():
    """m['pp'] of a mesh (dp,tp). Report: KeyError pp, line."""
    from torch.distributed.device_mesh import init_device_mesh
    init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["pp"]  # BUG


@broken()
def dtensor_redistribute_some():
    """Only ranks with a positive mean gather the DTensor. Report: rank 0 not in redistribute; this line on others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    d = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    if d.to_local().mean() > 1:
        d.redistribute(placements=[Replicate()])  # BUG


@broken()
def functional_missing_rank():
    """funcol.all_reduce on three ranks, whose result is used. Report: ranks 0-2 wait (line of use), rank 3 returned."""
    import torch.distributed._functional_collectives as fc
    if dist.get_rank() < 3:
        t = fc.all_reduce(torch.ones(2), "sum", dist.group.WORLD)  # BUG
        return t.sum().item()


@broken()
def functional_mismatched_dim():
    """all_gather_tensor of other shapes. Report: (2,) vs (3,) with rank 1."""
    import torch.distributed._functional_collectives as fc
    t = fc.all_gather_tensor(torch.ones(3 if dist.get_rank() == 1 else 2), 0, dist.group.WORLD)  # BUG
    return fc.wait_tensor(t).tolist()


@broken()
def functional_reduce_scatter_indivisible():
    """reduce_scatter_tensor of 6 rows over 4. Report: 6 not divisible by 4, line."""
    import torch.distributed._functional_collectives as fc
    fc.wait_tensor(fc.reduce_scatter_tensor(torch.ones(6), "sum", 0, dist.group.WORLD))  # BUG


@broken(n=2)
def pipelining_one_stage_skips():
    """PipelineStage with GPipe; stage 1 skips the step. Report: stage 0 waits in step() at this line (send to rank 1),
    rank 1 returned."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    r = dist.get_rank()
    st = PipelineStage(nn.Linear(4, 4), r, 2, torch.device("cpu"))
    s = ScheduleGPipe(st, 2, loss_fn=nn.MSELoss())
    if r == 0:
        s.step(torch.ones(4, 4))  # BUG


@broken(n=2)
def pipelining_micro_batches_differ():
    """Stages disagree on the number of micro-batches. Report: rank 0 4 x (1,4), rank 1 2 x (2,4): mismatch, line of step."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    r = dist.get_rank()
    st = PipelineStage(nn.Linear(4, 4), r, 2, torch.device("cpu"))
    s = ScheduleGPipe(st, 4 if r == 0 else 2, loss_fn=nn.MSELoss())
    if r == 0:
        s.step(torch.ones(4, 4))  # BUG
    else:
        s.step(target=torch.ones(4, 4))  # BUG


@broken(n=2)
def pipelining_shape_mismatch():
    """Stage 0 gives 4 features, stage 1 takes 5. Report: rank 1 matmul error at step line."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    r = dist.get_rank()
    st = PipelineStage(nn.Linear(4, 4) if r == 0 else nn.Linear(5, 4), r, 2, torch.device("cpu"))
    s = ScheduleGPipe(st, 2, loss_fn=nn.MSELoss())
    s.step(torch.ones(4, 4)) if r == 0 else s.step(target=torch.ones(4, 4))  # BUG


@broken(n=2)
def pipelining_both_stage0():
    """Both ranks build stage 0. Report: both wait in step() for rank 1 ... stage_index=rank."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    st = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"))
    ScheduleGPipe(st, 2, loss_fn=nn.MSELoss()).step(torch.ones(4, 4))  # BUG


@broken(n=2)
def dcp_save_on_rank0():
    """dcp.save on rank 0 only without no_dist. Report: rank 0 waits in dcp.save at this line; rank 1 in barrier."""
    import tempfile
    import torch.distributed.checkpoint as dcp
    if dist.get_rank() == 0:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp())  # BUG
    dist.barrier()


@broken(n=2)
def dcp_load_missing_key():
    """dcp.load asks for a key that was not saved. Report: CheckpointException/missing key 'v', line."""
    import tempfile
    import torch.distributed.checkpoint as dcp
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, 0)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path[0])
    dcp.load({"v": torch.zeros(2)}, checkpoint_id=path[0])  # BUG


@broken(n=2)
def dcp_async_save_next_collective():
    """dcp.async_save with a default group only on rank 0, then the world's barrier. Report: rank 0's saver thread."""
    import tempfile
    import torch.distributed.checkpoint as dcp
    if dist.get_rank() == 0:
        f = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tempfile.mkdtemp())  # BUG
        f.result()
    dist.barrier()


@broken(n=2)
def load_before_save():
    """Rank 1 loads a checkpoint before rank 0 has written it (no barrier). Report: FileNotFoundError rank 1, line."""
    import tempfile
    path = os.path.join(tempfile.gettempdir(), "str-nope", "ckpt.pt")
    if dist.get_rank() == 1:
        torch.load(path)  # BUG
    dist.barrier()


# ---------------------------------------------------------------- parameter servers, elastic, stores
@broken()
def ps_server_expects_fixed_steps():
    """Server serves 2 steps of 3 workers in rank order, worker 2 leaves after step 1. Report: server waits in recv from 2
    (returned), and others wait for their replies."""
    r, t = dist.get_rank(), torch.ones(1)
    if r == 0:
        for _ in range(2):
            for c in (1, 2, 3):
                dist.recv(t, c)  # BUG
            for c in (1, 2, 3):
                dist.send(t, c)
    else:
        for _ in range(1 if r == 2 else 2):
            dist.send(t, 0)
            dist.recv(t, 0)


@broken()
def ps_ssp_bound_deadlock():
    """Stale-synchronous: fast workers wait in the store for the slowest clock, which has finished without moving it.
    Report: ranks 1,2 poll/wait key 'clock-3-2', never set; rank 3 returned."""
    store = dist.distributed_c10d._get_default_store()
    r = dist.get_rank()
    for step in range(3 if r != 3 else 2):
        store.set(f"clock-{r}-{step}", "1")
        store.wait([f"clock-{o}-{step}" for o in range(4)])  # BUG


@broken(n=2)
def elastic_rendezvous_off_by_one():
    """Hand-made rendezvous waits for the third arrival in a world of two. Report: wait for 'all-here', nobody sets it."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("arrived", 1) == 3:
        store.set("all-here", "1")
    store.wait(["all-here"])  # BUG


@broken(n=2)
def store_prefix_mismatch():
    """Rank 0 sets in PrefixStore('a'), rank 1 reads in 'b'. Report: rank 1 waits get('cfg') in prefix b; set in prefix a."""
    base = dist.distributed_c10d._get_default_store()
    s = dist.PrefixStore("ab"[dist.get_rank()], base)
    if dist.get_rank() == 0:
        s.set("cfg", "1")
    else:
        s.get("cfg")  # BUG
    dist.barrier()


@broken(n=2)
def store_value_not_decoded():
    """Compares bytes to str from the store and so takes the wrong branch. Report: rank 1 waits for message; rank 0 returned."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("mode", "push")
        return
    if store.get("mode") == "push":  # BUG
        return
    dist.recv(torch.zeros(1), 0)


@broken()
def elastic_old_world_size():
    """After 'losing' rank 3 the survivors still gather from the world. Report: 0-2 wait in all_gather for 3: returned."""
    if dist.get_rank() == 3:
        return "left"
    out = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(out, torch.ones(1))  # BUG


@broken()
def tp_row_parallel_missing_reduce():
    """Row parallel layer: rank 0 forgets the all-reduce as it believes itself to be the driver. Report: 1-3 in all_reduce."""
    y = torch.ones(2, 2) @ torch.ones(2, 2)
    if dist.get_rank() > 0:
        dist.all_reduce(y)  # BUG
    dist.broadcast(y, 0)


@broken()
def tp_vocab_uneven():
    """Vocabulary of 10 over 4 ranks with chunk(): shards 3,3,3,1 all-gathered as equal. Report: (3,) on 0-2, (1,) on 3."""
    w = torch.arange(10.0).chunk(4)[dist.get_rank()].clone()
    out = torch.zeros(4 * w.numel())
    dist.all_gather_into_tensor(out, w)  # BUG


@broken()
def seeds_differ_branch():
    """Stochastic depth with per-rank seeds decides whether to call a collective. Report: which ranks skipped; line."""
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        if torch.rand(()) > 0.5:
            dist.all_reduce(torch.ones(1))  # BUG


@broken()
def generator_yield_collective():
    """A generator all-reduces when advanced; rank 2 takes one item less. Report: line in the generator; rank 2 returned."""
    def batches():
        for i in range(3):
            t = torch.tensor(float(i))
            dist.all_reduce(t)  # BUG
            yield t.item()
    out = []
    for x in batches():
        out.append(x)
        if dist.get_rank() == 2 and len(out) == 2:
            break
    return out


@broken()
def isend_buffer_reused():
    """Reuses the isend buffer before wait. Report: buffer changed before wait at this line."""
    r = dist.get_rank()
    t, u = torch.full((4,), float(r)), torch.zeros(4)
    w = dist.isend(t, (r + 1) % 4)
    t += 100  # BUG
    dist.recv(u, (r - 1) % 4)
    w.wait()
    return u.tolist()


@broken(n=2)
def irecv_read_before_wait():
    """Reads the irecv buffer before wait. Report: read before wait (at least the unwaited handle's line)."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        w = dist.irecv(t, 0)
        x = t.item()  # BUG
        w.wait()
        assert x == 1.0


@broken(n=2)
def poll_irecv_never_completes_on_gloo():
    """Polls is_completed() of an irecv: gloo's point-to-point handles never say True before wait(). Report: gloo doesn't complete
    by polling: call wait()."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
        return
    w = dist.irecv(t, 0)
    while not w.is_completed():  # BUG
        time.sleep(0.001)
    return t.item()


# ---------------------------------------------------------------- second helping
@broken()
def all_gather_into_missing_rank():
    """all_gather_into_tensor without rank 3. Report: ranks 0-2 wait at this line; rank 3 returned."""
    if dist.get_rank() < 3:
        dist.all_gather_into_tensor(torch.zeros(4), torch.ones(1))  # BUG


@broken()
def reduce_scatter_tensor_missing_rank():
    """reduce_scatter_tensor without rank 3. Report: ranks 0-2 wait at this line; rank 3 returned."""
    if dist.get_rank() < 3:
        dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(4))  # BUG


@broken()
def all_to_all_single_missing_rank():
    """all_to_all_single without rank 0 (a gate that got no tokens). Report: ranks 1-3 wait at this line; rank 0 returned."""
    if dist.get_rank() > 0:
        dist.all_to_all_single(torch.zeros(4), torch.ones(4))  # BUG


@broken()
def all_gather_into_against_all_gather():
    """Rank 0 takes all_gather_into_tensor, the others all_gather. Report: which rank calls what, lines."""
    if dist.get_rank() == 0:
        dist.all_gather_into_tensor(torch.zeros(8), torch.ones(2))  # BUG
    else:
        dist.all_gather([torch.zeros(2) for _ in range(4)], torch.ones(3))  # BUG


@broken()
def store_some_keys_missing():
    """store.wait for four keys of which three are set. Report: only 'up-3' has never been set; rank 3 returned."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() < 3:
        s.set(f"up-{dist.get_rank()}", "1")
        s.wait([f"up-{i}" for i in range(4)])  # BUG


@broken(n=2)
def store_deleted_key():
    """Rank 0 sets and deletes a key before rank 1 gets it. Report: 'tmp' was set by rank 0 and deleted at this line."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        s.set("tmp", "1")
        s.delete_key("tmp")  # BUG
        dist.barrier()
    else:
        dist.barrier()
        s.get("tmp")


@broken(n=2)
def store_typo_get():
    """get('mastr') where 'master' was set. Report: 'mastr' never set; there is 'master' (set by rank 0)."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        s.set("master", "h:1")
    else:
        s.get("mastr")  # BUG


@broken(n=2)
def fsdp_shape_on_one_rank():
    """fully_shard with another width on rank 1. Report: all-gather sizes differ, line of forward (or of fully_shard)."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8 if dist.get_rank() == 0 else 16)
    fully_shard(net)
    net(torch.ones(1, 8))  # BUG


@broken()
def ddp_find_unused_branch_none():
    """find_unused on, but rank 2 skips forward and backward for an empty batch. Report: 0,1,3 wait in forward/backward line
    for rank 2, which is in barrier."""
    net = DDP(nn.Linear(2, 2), find_unused_parameters=True)
    if dist.get_rank() != 2:
        net(torch.ones(1, 2)).sum().backward()  # BUG
    dist.barrier()


@broken()
def join_and_barrier():
    """A barrier in the loop inside join() with uneven inputs. Report: the barrier of this line isn't shadowed by join."""
    net = DDP(nn.Linear(2, 2))
    with net.join():
        for _ in range(2 + (dist.get_rank() == 0)):
            net(torch.ones(1, 2)).sum().backward()
            dist.barrier()  # BUG


@broken(n=2)
def swallowed_recv_shape():
    """Rank 1 swallows the mismatch of its recv and goes on to the barrier. Report: rank 0's send (4,) against rank 1's recv
    (3,), caught at the except."""
    try:
        if dist.get_rank() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.zeros(3), 0)  # BUG
    except Exception:
        pass
    dist.barrier()


@broken()
def swallowed_value_error_then_other_call():
    """Rank 2's scatter raises (list too short on root 2), is swallowed, and rank 2 goes on to the all_reduce. Report: rank 2's
    scatter raised ValueError at this line, was caught; the others wait in scatter."""
    out = torch.zeros(1)
    try:
        dist.scatter(out, [torch.ones(1)] * 3 if dist.get_rank() == 2 else None, src=2)  # BUG
    except ValueError:
        pass
    dist.all_reduce(out)


@broken()
def logged_and_continue():
    """A trainer catches RuntimeError per step, logs and continues; rank 1's loss function raises in step 1. Report: rank 1 is one
    call behind; RuntimeError of this line was caught."""
    log = []
    for step in range(3):
        try:
            if step == 1 and dist.get_rank() == 1:
                raise RuntimeError("CUDA out of memory")  # BUG
            dist.all_reduce(torch.full((step + 1,), 1.0))
        except RuntimeError as e:
            log.append(str(e))
    return log


@broken(n=2)
def context_manager_swallows():
    """contextlib.suppress hides a KeyError on rank 0. Report: rank 0 returned; suppressed KeyError at this line."""
    import contextlib
    with contextlib.suppress(KeyError):
        t = torch.tensor({0: {}, 1: {"x": 1.0}}[dist.get_rank()]["x"])  # BUG
        dist.all_reduce(t)


@broken(n=2)
def exit_hook_collective():
    """A context manager's __exit__ does a barrier; rank 0 raises within and the barrier hangs it. Report: rank 0's KeyError
    at this line."""
    class Sync:
        def __enter__(self):
            return self
        def __exit__(self, *a):
            dist.barrier()
    with Sync():
        if dist.get_rank() == 0:
            {}["x"]  # BUG
        dist.all_reduce(torch.ones(1))


@broken(n=2)
def del_collective():
    """A __del__ with a barrier: collected at different times. Report: rank 1 in barrier from __del__ at this line."""
    class H:
        def __del__(self):
            dist.barrier()  # BUG
    h = H()
    if dist.get_rank() == 1:
        del h
        dist.all_reduce(torch.ones(1))
        return
    dist.all_reduce(torch.ones(1))
    del h


# ---------------------------------------------------------------- `raises X`: the program goes on
@broken(n=2, raises="RuntimeError")
def raises_wait_timeout_then_ok():
    """A wait(1 s) that expires is caught, and the program says so."""
    out = "?"
    if dist.get_rank() == 1:
        try:
            dist.irecv(torch.zeros(1), 0).wait(timedelta(seconds=1))
            out = "arrived"
        except RuntimeError as e:
            out = type(e).__name__
    return out


@broken(n=2, raises="DistStoreError")
def raises_store_wait():
    """store.wait(keys, 0.5 s) is caught, then the world goes on with a barrier."""
    out = None
    if dist.get_rank() == 1:
        try:
            dist.distributed_c10d._get_default_store().wait(["x"], timedelta(seconds=0.5))
        except Exception as e:
            out = [c.__name__ for c in type(e).__mro__[:3]]
    dist.barrier()
    return out


@broken(n=3, raises="RuntimeError")
def raises_monitored_barrier():
    """monitored_barrier without rank 2: ranks 0 raises an error naming rank 2; it is caught."""
    if dist.get_rank() == 2:
        time.sleep(3)
        return "late"
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as e:
        return type(e).__name__, "2" in str(e) or dist.get_rank() != 0
    return "passed"


@broken(n=2, raises="ValueError")
def raises_self_send():
    """Sending to oneself is caught."""
    try:
        dist.send(torch.ones(1), dist.get_rank())
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="ValueError")
def raises_invalid_src():
    """broadcast from rank 7: class of the error."""
    try:
        dist.broadcast(torch.ones(1), 7)
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="TypeError")
def raises_not_a_tensor():
    """all_reduce of a float: class of the error."""
    try:
        dist.all_reduce(1.0)
    except Exception as e:
        return type(e).__name__


@broken(n=4, raises="ValueError")
def raises_group_not_member_src():
    """src outside of the group: class of the error."""
    g = dist.new_group([2, 3])
    try:
        dist.broadcast(torch.ones(1), 0, group=g)
        return "none"
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="Exception")
def raises_unpicklable_everywhere():
    """All ranks gather a lambda: class of the error, then go on."""
    try:
        dist.all_gather_object([None] * 2, lambda: 1)
    except Exception as e:
        name = type(e).__name__
    dist.barrier()
    return name


@broken(n=2, raises="RuntimeError")
def raises_store_compare():
    """store.get with its own time limit of 1 s via set_timeout is caught."""
    store = dist.PrefixStore("p", dist.distributed_c10d._get_default_store())
    old = store.timeout
    store.set_timeout(timedelta(seconds=1))
    try:
        store.get("never")
        return "got"
    except Exception as e:
        return isinstance(e, RuntimeError)
    finally:
        store.set_timeout(old)


@broken(n=2, raises="Empty")
def raises_queue_empty():
    """queue.get(timeout=0.2) raises Empty, is caught."""
    try:
        queue.Queue().get(timeout=0.2)
    except queue.Empty:
        dist.barrier()
        return "empty"


@broken(n=2, raises="TimeoutError")
def raises_future_timeout():
    """Future.result(timeout=0.2) of a slow job."""
    import concurrent.futures as cf
    with ThreadPoolExecutor(1) as p:
        f = p.submit(time.sleep, 1)
        try:
            f.result(timeout=0.2)
            return "done"
        except cf.TimeoutError:
            return "late"


@broken(n=2, raises="RuntimeError")
def raises_ddp_unused():
    """The second forward with an unused parameter raises RuntimeError, is caught."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.a(x)
    net = DDP(Net())
    net(torch.ones(1, 2)).sum().backward()
    try:
        net(torch.ones(1, 2)).sum().backward()
        return "none"
    except RuntimeError as e:
        return "finished reduction" in str(e)


@broken(n=2, raises="RuntimeError")
def raises_new_group_timeout():
    """A group limit of 1 s, rank 1 is 3 s late: rank 0 catches the time-out."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        return "late"
    try:
        dist.all_reduce(torch.ones(1), group=g)
        return "ok"
    except RuntimeError as e:
        return type(e).__name__


@broken(n=2, raises="RuntimeError")
def raises_timeout_swallowed_then_goes_on():
    """A caught time-out of a group's collective; both ranks say what they saw and go on in the world."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2.5)
    saw = "ok"
    try:
        dist.all_reduce(torch.ones(1), group=g)
    except RuntimeError:
        saw = "error"
    dist.all_reduce(torch.ones(2))
    return saw


@broken(n=2, raises="RuntimeError")
def raises_in_backward_hook():
    """A gradient hook raises; caught; both go on."""
    x = torch.ones(1, requires_grad=True)
    def bad(g):
        raise RuntimeError("hook")
    x.register_hook(bad)
    try:
        (x * 2).sum().backward()
        s = "none"
    except RuntimeError as e:
        s = str(e)
    dist.barrier()
    return s


@broken(n=2, raises="RuntimeError")
def raises_recv_wrong_shape_view():
    """all_gather with wrong output shapes: class of the error."""
    try:
        dist.all_gather([torch.zeros(2)] * 2, torch.ones(3))
        return "none"
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="RuntimeError")
def raises_scatter_short_class():
    """scatter list too short on the root: class of the error there."""
    if dist.get_rank() == 0:
        try:
            dist.scatter(torch.zeros(1), [torch.ones(1)], src=0)
        except Exception as e:
            return type(e).__name__


@broken(n=2, raises="RuntimeError")
def raises_reduce_scatter_class():
    """reduce_scatter_tensor with indivisible sizes: class of the error."""
    try:
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(5))
        return "none"
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="RuntimeError")
def raises_all_to_all_splits_class():
    """all_to_all_single with wrong splits: class of the error."""
    try:
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 1], [2, 2])
        return "none"
    except Exception as e:
        return type(e).__name__


@broken(n=2, raises="RuntimeError")
def raises_band_float_class():
    """BAND of floats: class of the error."""
    try:
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
        return "none"
    except Exception as e:
        return type(e).__name__
