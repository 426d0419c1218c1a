"""Broken programs, second list: written later, by somebody else; expectations before the first run."""

import threading, time, queue
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from registry import broken


def _mesh(shape, names):
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _store():
    return dist.distributed_c10d._get_default_store()


# ---------------------------------------------------------------- several groups, mesh axes
@broken()
def mesh_one_rank_other_axis():
    """Rank 2 averages over "dp" where all others average over "tp". Report: rank 2 is in axis dp (0, 2), its tp partner 3 waits
    for it; rank 2's group is wrong. Not: ranks 0, 1, 3."""
    m = _mesh((2, 2), ("dp", "tp"))
    t = torch.ones(1)
    dist.all_reduce(t, group=m.get_group("dp" if dist.get_rank() == 2 else "tp"))  # BUG
    dist.barrier()


@broken(n=8)
def mesh3d_order_of_axes():
    """Eight ranks, pp x dp x tp; ranks 5 and 6 reduce over dp before tp, everybody else tp before dp: a cycle over 4, 5, 7, 6.
    Report: ranks 5 and 6 have the other order; the axes' names; ranks 0-3 are done and innocent."""
    m = _mesh((2, 2, 2), ("pp", "dp", "tp"))
    t = torch.ones(1)
    for name in (["dp", "tp"] if dist.get_rank() in (5, 6) else ["tp", "dp"]):
        dist.all_reduce(t, group=m.get_group(name))  # BUG
    dist.barrier()


@broken()
def mesh_root_as_local_rank():
    """Broadcast within each tp row from src = the local rank 0, which is the global rank 0: not in the row of 2, 3. Report:
    rank 0 is not in the group [2, 3]; group_src=0 or mesh's global rank."""
    m = _mesh((2, 2), ("dp", "tp"))
    t = torch.ones(1)
    dist.broadcast(t, src=0, group=m.get_group("tp"))  # BUG


@broken()
def root_in_group_and_global_counting():
    """In the group [1, 2, 3], rank 3 gives src=1 (meaning the second member), the others group_src=1. Report: roots 1 and 2 of
    the same broadcast (global), src= against group_src=; rank 3."""
    g = dist.new_group([1, 2, 3])
    t = torch.ones(1)
    r = dist.get_rank()
    if r == 3:
        dist.broadcast(t, src=1, group=g)  # BUG
    elif r > 0:
        dist.broadcast(t, group_src=1, group=g)


@broken()
def new_group_of_own_view():
    """After a 'failure' of rank 3, rank 2 has not heard of it and makes a group of all, the others one of 0-2. Report:
    new_group of 0-2 on ranks 0, 1 and of 0-3 on 2 (and 3)."""
    alive = [0, 1, 2, 3] if dist.get_rank() >= 2 else [0, 1, 2]
    g = dist.new_group(alive)  # BUG
    dist.all_reduce(torch.ones(1), group=g)


@broken(n=2)
def twin_groups_swapped():
    """Two groups of the same two ranks; rank 1 has mixed them up. Report: rank 0 in group A (made first), rank 1 in group B
    (made second): tell them apart."""
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 1:
        a, b = b, a  # BUG
    dist.all_reduce(torch.ones(1), group=a)
    dist.barrier(group=b)


@broken()
def group_missing_in_dict():
    """The group is looked up with dict.get(): rank 3 isn't listed, gets None, which is the world. Report: rank 3 all-reduces in
    the world, ranks 0-2 in their group / returned; group is None."""
    g = dist.new_group([0, 1, 2])
    groups = {0: g, 1: g, 2: g}
    dist.all_reduce(torch.ones(1), group=groups.get(dist.get_rank()))  # BUG


@broken()
def hsdp_shard_and_replicate_swapped():
    """HSDP by hand: reduce-scatter in "shard", all-reduce in "replicate"; rank 1 swaps the two axes in both calls. Report: rank 1
    is in reduce_scatter of [1, 3] while rank 0 waits for it in [0, 1]."""
    m = _mesh((2, 2), ("replicate", "shard"))
    a, b = ("replicate", "shard") if dist.get_rank() == 1 else ("shard", "replicate")
    grad, out = torch.ones(4), torch.zeros(2)
    dist.reduce_scatter_tensor(out, grad, group=m.get_group(a))  # BUG
    dist.all_reduce(out, group=m.get_group(b))


# ---------------------------------------------------------------- pipelines
@broken(n=3)
def pipeline_middle_sends_gradient_first():
    """The middle stage sends a gradient to stage 0 before it has received the activation. Report: 0 waits in send to 1, 1 in
    send to 0 (this line), 2 in recv from 1."""
    r, t = dist.get_rank(), torch.ones(2)
    if r == 0:
        dist.send(t, 1)
        dist.recv(t, 1)
    elif r == 1:
        dist.send(t, 0)  # BUG
        dist.recv(t, 0)
        dist.send(t, 2)
        dist.recv(t, 2)
    else:
        dist.recv(t, 1)
        dist.send(t, 1)


@broken()
def pipeline_last_stage_one_more():
    """The last stage expects 4 micro-batches, the others make 3. Report: rank 3's recv number 4 from rank 2, which returned after
    3 sends."""
    r = dist.get_rank()
    for _ in range(4 if r == 3 else 3):  # BUG
        t = torch.ones(2)
        if r > 0:
            dist.recv(t, r - 1)
        if r < 3:
            dist.send(t, r + 1)


@broken(n=3)
def pipeline_tag_per_micro_batch():
    """Tags count micro-batches from 0; stage 2 counts from 1. Report: rank 1 sends tag 0, rank 2 wants tag 1 at this line;
    rank 0 only waits behind."""
    r = dist.get_rank()
    for m in range(3):
        t = torch.ones(2)
        if r > 0:
            dist.recv(t, r - 1, tag=m + (r == 2))  # BUG
        if r < 2:
            dist.send(t, r + 1, tag=m)


@broken(n=2)
def pipeline_wait_too_early():
    """Stage 0 waits for each isend at once, stage 1 answers each micro-batch with a blocking gradient. Report: rank 0 waits for
    isend 2 (this line), rank 1 in send back; receive the gradient before."""
    t = torch.ones(2)
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.isend(t, 1).wait()  # BUG
        for _ in range(2):
            dist.recv(t, 1)
    else:
        for _ in range(2):
            dist.recv(t, 0)
            dist.send(t, 0)


@broken(n=2)
def pipeline_short_last_micro_batch():
    """The last micro-batch of stage 0 is short, stage 1 receives all into the same buffer. Report: message 3: (3, 4) sent, (8, 4)
    expected."""
    buf = torch.zeros(8, 4)
    for m, x in enumerate(torch.ones(19, 4).split(8)):
        if dist.get_rank() == 0:
            dist.send(x, 1)  # BUG
        else:
            dist.recv(buf, 0)


@broken(n=2)
def pipelining_other_schedule():
    """Rank 0 runs GPipe, rank 1 1F1B. Report: schedules differ: GPipe on 0, 1F1B on 1; line of step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    r = dist.get_rank()
    st = PipelineStage(nn.Linear(4, 4), r, 2, torch.device("cpu"))
    s = (ScheduleGPipe if r == 0 else Schedule1F1B)(st, 4, loss_fn=nn.MSELoss())  # BUG
    s.step(torch.ones(4, 4)) if r == 0 else s.step(target=torch.ones(4, 4))


@broken(n=3)
def pipeline_skip_connection_from_wrong_stage():
    """Stage 0 sends a skip connection to stage 2, which receives both tensors from stage 1. Report: rank 2's second recv must be
    from rank 0 (0 sends to 2 at its line)."""
    r, t = dist.get_rank(), torch.ones(2)
    if r == 0:
        dist.send(t, 1)
        dist.send(t, 2)
    elif r == 1:
        dist.recv(t, 0)
        dist.send(t, 2)
    else:
        dist.recv(t, 1)
        dist.recv(t, 1)  # BUG


@broken(n=2)
def pipeline_batch_on_one_side_only():
    """Steady state of 1F1B: rank 0 posts send-forward and recv-backward together, rank 1 sends backward twice before it receives.
    Report: rank 1's second send (this line), rank 0 waits for its isend to be received."""
    t, u = torch.ones(2), torch.zeros(2)
    if dist.get_rank() == 0:
        for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1), dist.P2POp(dist.irecv, u, 1)]):
            w.wait()
    else:
        for _ in range(2):
            dist.send(t, 0)  # BUG
        dist.recv(u, 0)


# ---------------------------------------------------------------- FSDP, DDP
@broken()
def fsdp_layer_skipped_on_one():
    """Stochastic depth: rank 2 skips a fully_shard-ed layer. Report: 0, 1, 3 wait in the all-gather of layer 1 for rank 2, which
    gathers the head of another size (or is in barrier); line of the layer."""
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    for x in layers:
        fully_shard(x)
    x = torch.ones(1, 8)
    for i, layer in enumerate(layers):
        if i == 1 and dist.get_rank() == 2:
            continue  # BUG
        x = layer(x)
    x.sum().backward()


@broken(n=2)
def fsdp_clip_on_rank0():
    """clip_grad_norm_ of sharded gradients on rank 0 only, for the log. Report: rank 0 in the all_reduce of the norm (this line),
    rank 1 in barrier."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    net(torch.ones(1, 8)).sum().backward()
    if dist.get_rank() == 0:
        print(nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor().item(), end="")  # BUG
    dist.barrier()


@broken(n=2)
def fsdp_frozen_on_one():
    """Rank 1 froze the layer before fully_shard: no reduce-scatter there. Report: rank 0 waits in backward's reduce_scatter; rank 1
    returned / requires_grad differs."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 1:
        net[0].requires_grad_(False)  # BUG
    for x in net:
        fully_shard(x)
    net(torch.ones(1, 8)).sum().backward()


@broken()
def ddp_unused_layer_on_one():
    """Rank 1 doesn't use the second layer (no auxiliary loss there) and there is no find_unused_parameters. Report: 0, 2, 3 wait in
    backward for rank 1, whose backward left out parameters of b."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.a(x) if dist.get_rank() == 1 else self.b(self.a(x))
    net = DDP(Net())
    net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_two_models_other_order():
    """A GAN: rank 3 steps the discriminator before the generator. Report: rank 3 is in another model's backward (or buffers), at
    this line: the same order of the models on all ranks; not 'the same size'."""
    g, d = DDP(nn.Linear(2, 3)), DDP(nn.Linear(2, 1))
    for net in ([d, g] if dist.get_rank() == 3 else [g, d]):
        net(torch.ones(1, 2)).sum().backward()  # BUG


@broken()
def ddp_metric_only_if_correct():
    """The accuracy is reduced only by ranks with a correct sample; the next backward's all_reduce of the others meets it. Report:
    all_reduce () of this line on some ranks, the gradient all_reduce (6,) on the others: not shapes, but a skipped call."""
    net = DDP(nn.Linear(2, 2))
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        if dist.get_rank() in (1, 2):
            dist.all_reduce(torch.tensor(1.0))  # BUG


# ---------------------------------------------------------------- tensor parallel
@broken()
def tp_column_forgets_gather():
    """Rank 1 does not gather the column-parallel output and goes on to the all_reduce of the loss. Report: all_gather on 0, 2, 3,
    all_reduce on rank 1: rank 1 skipped the all_gather."""
    y = torch.ones(2, 2)
    if dist.get_rank() != 1:
        dist.all_gather([torch.zeros(2, 2) for _ in range(4)], y)  # BUG
    dist.all_reduce(y.sum())


@broken()
def tp_backward_reduce_of_frozen_input():
    """Megatron's f: all_reduce in backward; on rank 2 the input needs no gradient, so its backward never runs. Report: 0, 1, 3 wait
    in all_reduce (line in backward) for rank 2, which is in barrier."""
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)
        @staticmethod
        def backward(ctx, g):
            g = g.clone()
            dist.all_reduce(g)  # BUG
            return g
    x = torch.ones(2, requires_grad=dist.get_rank() != 2)
    w = torch.ones(2, requires_grad=True)
    (F.apply(x) * w).sum().backward()
    dist.barrier()


@broken(n=2)
def tp_forward_once_more_on_rank0():
    """parallelize_module, and rank 0 runs the model once more 'to look at the output'. Report: rank 0 waits in forward's all_reduce
    (this line); rank 1 returned."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(net, _mesh((2,), ("tp",)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net(torch.ones(1, 4))
    if dist.get_rank() == 0:
        print(net(torch.ones(1, 4)).sum().item(), end="")  # BUG


@broken()
def tp_reduce_in_world_on_one():
    """tp of 2: rank 3 forgets group=, so its partner waits in the pair and it in the world. Report: rank 3's all_reduce lacks
    group=; rank 2 waits for 3 in [2, 3]."""
    m = _mesh((2, 2), ("dp", "tp"))
    y = torch.ones(2)
    dist.all_reduce(y, group=None if dist.get_rank() == 3 else m.get_group("tp"))  # BUG


@broken()
def sequence_parallel_mixed_halves():
    """Reduce-scatter instead of all-reduce on rank 0 only (sequence parallelism switched on by a local flag). Report:
    reduce_scatter on rank 0, all_reduce on 1-3."""
    y = torch.ones(4)
    if dist.get_rank() == 0:
        dist.reduce_scatter_tensor(torch.zeros(1), y)  # BUG
    else:
        dist.all_reduce(y)


# ---------------------------------------------------------------- parameter servers with threads
@broken(n=3)
def ps_any_source_steals_control():
    """Two threads of the server receive from anyone: the gradient thread (two messages) steals the stop message, and the control
    thread waits for ever. Report: rank 0's thread 'control' waits in recv from any at this line; both threads receive from anyone
    without tags."""
    if dist.get_rank() == 0:
        def gradients():
            for _ in range(2):
                dist.recv(torch.zeros(1))
        def control():
            time.sleep(0.5)
            for _ in range(3):
                dist.recv(torch.zeros(1))  # BUG
        ths = [threading.Thread(target=f, name=f.__name__) for f in (gradients, control)]
        [t.start() for t in ths]
        [t.join() for t in ths]
    else:
        dist.send(torch.ones(1), 0)
        dist.send(-torch.ones(1), 0)


@broken(n=3)
def ps_reply_in_rank_order():
    """The server receives from anyone and replies in rank order instead of to the sender; worker 1 is slow. Report: rank 0 sends to
    rank 1 at this line, rank 1 is still in its own send / sleeps; rank 2 waits for its reply."""
    r, t = dist.get_rank(), torch.ones(1)
    if r == 0:
        for c in (1, 2):
            dist.recv(t)
            dist.send(t, c)  # BUG
    else:
        if r == 1:
            time.sleep(0.2)
        dist.send(t, 0)
        dist.recv(t, 0)


@broken(n=3)
def ps_lock_held_while_receiving():
    """Each server thread holds the model's lock while it receives, and worker 1 pushes only when worker 2 has been served. Report:
    rank 0's 'serve-1' holds the lock in recv from 1, 'serve-2' waits for that lock at this line."""
    r, t = dist.get_rank(), torch.ones(1)
    if r == 0:
        lock = threading.Lock()
        def serve(c):
            with lock:  # BUG
                u = torch.zeros(1)
                dist.recv(u, c)
                dist.send(u, c)
        ths = [threading.Thread(target=serve, args=(c,), name=f"serve-{c}") for c in (1, 2)]
        for th in ths:
            th.start()
            time.sleep(0.01)
        [th.join() for th in ths]
    elif r == 1:
        dist.recv(t, 2)
        dist.send(t, 0)
        dist.recv(t, 0)
    else:
        dist.send(t, 0)
        dist.recv(t, 0)
        dist.send(t, 1)


@broken(n=3)
def ps_stop_message_missing():
    """The server's threads end when a worker sends -1; worker 2 leaves its loop without it. Report: rank 0's thread 'serve-2' waits in
    recv from 2 at this line; rank 2 returned after 2 sends."""
    r = dist.get_rank()
    if r == 0:
        def serve(c):
            t = torch.zeros(1)
            while t.item() >= 0:
                dist.recv(t, c)  # BUG
        ths = [threading.Thread(target=serve, args=(c,), name=f"serve-{c}") for c in (1, 2)]
        [t.start() for t in ths]
        [t.join() for t in ths]
    else:
        for _ in range(2):
            dist.send(torch.ones(1), 0)
        if r == 1:
            dist.send(-torch.ones(1), 0)


@broken(n=2)
def ps_server_thread_dies():
    """The server's thread fails on the second gradient (a key that isn't there), main waits for its event. Report: rank 0's thread
    'server' raised KeyError at this line; rank 1 waits in its send number 2."""
    done = threading.Event()
    if dist.get_rank() == 0:
        def serve():
            weights = {0: 1.0}
            for i in range(2):
                t = torch.zeros(1)
                dist.recv(t, 1)
                weights[i] += t.item()  # BUG
                dist.send(t, 1)
            done.set()
        threading.Thread(target=serve, name="server", daemon=True).start()
        done.wait()
    else:
        for _ in range(2):
            dist.send(torch.ones(1), 0)
            dist.recv(torch.zeros(1), 0)


@broken(n=2)
def ps_update_queue_never_drained():
    """The receiving thread of the server puts gradients into a bounded queue that main reads only after joining it. Report: rank 0's
    thread 'rx' waits in put (queue full, 1) at this line; main joins it; rank 1 waits in its send."""
    if dist.get_rank() == 0:
        q = queue.Queue(maxsize=1)
        def rx():
            for _ in range(3):
                t = torch.zeros(1)
                dist.recv(t, 1)
                q.put(t)  # BUG
        th = threading.Thread(target=rx, name="rx")
        th.start()
        th.join()
        return [q.get().item() for _ in range(3)]
    for _ in range(3):
        dist.send(torch.ones(1), 0)


# ---------------------------------------------------------------- elastic workers, heartbeats
@broken()
def elastic_survivors_forget_group():
    """Rank 3 leaves; the survivors make a group of 0-2 and use it, but one barrier still goes to the world. Report: ranks 0-2 wait in
    barrier of the world for rank 3, which left: group= is missing at this line (there is a group of 0-2)."""
    if dist.get_rank() == 3:
        return "left"
    g = dist.new_group([0, 1, 2])
    t = torch.ones(1)
    dist.all_reduce(t, group=g)
    dist.barrier()  # BUG
    return t.item()


@broken(n=3)
def elastic_two_views():
    """Rank 2 leaves; rank 0 knows and uses the small group, rank 1 doesn't and uses the world. Report: rank 0 in all_reduce of
    [0, 1], rank 1 in the world (this line): another view of who is alive."""
    g = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    dist.all_reduce(torch.ones(1), group=g if dist.get_rank() == 0 else None)  # BUG


@broken(n=2)
def heartbeat_dies():
    """Rank 1's heartbeat thread dies of a ZeroDivisionError at beat 2; rank 0's monitor waits for beat 2's key. Report: nobody set
    'hb-1-2'; rank 1's thread 'heart' raised ZeroDivisionError at this line."""
    s = _store()
    if dist.get_rank() == 1:
        def heart():
            for i in range(4):
                s.set(f"hb-1-{i}", str(1 / (2 - i)))  # BUG
                time.sleep(0.1)
        th = threading.Thread(target=heart, name="heart")
        th.start()
        th.join()
    else:
        for i in range(4):
            s.wait([f"hb-1-{i}"])
    dist.barrier()


@broken(n=3)
def heartbeat_monitor_stops_at_first():
    """The monitor on rank 0 polls check() of done-keys; rank 2 writes 'done_2' instead of 'done-2'. Report: rank 0 polls for
    'done-2', never set; 'done_2' was set by rank 2 (this line)."""
    s, r = _store(), dist.get_rank()
    if r == 0:
        while not s.check([f"done-{i}" for i in (1, 2)]):
            time.sleep(0.1)
    else:
        s.set(f"done-{r}" if r == 1 else f"done_{r}", "1")  # BUG
    dist.barrier()


@broken(n=3)
def elastic_old_generation():
    """After a restart the survivors meet in PrefixStore('gen1'); rank 2 still has generation 0. Report: rank 2 waits for
    'gen0/go', which is only set as 'gen1/go'."""
    gen = 0 if dist.get_rank() == 2 else 1
    s = dist.PrefixStore(f"gen{gen}", _store())  # BUG
    if dist.get_rank() == 0:
        s.set("go", "1")
    s.wait(["go"])


@broken(n=2)
def elastic_leaves_without_telling():
    """Rank 1 leaves (destroys its group) between two steps, its peer is in the middle of an exchange. Report: rank 1 left at this
    line; rank 0 waits in its recv."""
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            dist.destroy_process_group()  # BUG
            return "left"
        u = torch.zeros(1)
        w = dist.isend(torch.ones(1), 1 - dist.get_rank())
        dist.recv(u, 1 - dist.get_rank())
        w.wait()


# ---------------------------------------------------------------- stores
@broken()
def store_deleted_after_first_reader():
    """Rank 0 deletes the key as soon as one of three readers has acknowledged. Report: rank 3 (slow) waits for 'cfg', which rank 0 set
    and deleted at this line."""
    s = _store()
    if dist.get_rank() == 0:
        s.set("cfg", "1")
        s.wait(["ack"])
        s.delete_key("cfg")  # BUG
    else:
        time.sleep(0.1 * (dist.get_rank() - 1))
        s.get("cfg")
        s.set("ack", "1")


@broken(n=2)
def store_key_with_rank_of_reader():
    """Each rank publishes addr/<rank> and reads addr/<rank> of rank + 1 without the modulo. Report: rank 1 waits for 'addr/2', which
    nobody sets; the keys addr/0 and addr/1 are there."""
    s, r = _store(), dist.get_rank()
    s.set(f"addr/{r}", "h")
    s.get(f"addr/{r + 1}")  # BUG


@broken(n=2)
def store_timeout_of_own_setting():
    """store.set_timeout(1 s) and a key with a typo, error not caught. Report: rank 1's get('stpe') ran out of its 1 s at this line;
    'step' is there."""
    s = dist.PrefixStore("x", _store())
    s.set_timeout(timedelta(seconds=1))
    if dist.get_rank() == 0:
        s.set("step", "1")
    else:
        s.get("stpe")  # BUG


# ---------------------------------------------------------------- time limits, any source, tags
@broken()
def monitored_barrier_two_missing():
    """monitored_barrier(wait_all_ranks=True) without ranks 1 and 3. Report: ranks 1 and 3 are missing: 1 returned, 3 is in recv."""
    r = dist.get_rank()
    if r == 3:
        dist.recv(torch.zeros(1), 0)  # BUG
    if r != 1:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)


@broken(n=3)
def wait_limit_on_wrong_peer():
    """Rank 0 waits 1 s for rank 2, but rank 1 sends. Report: recv from rank 2 timed out; rank 1 has a send to rank 0 pending, rank 2
    returned."""
    if dist.get_rank() == 0:
        dist.irecv(torch.zeros(1), 2).wait(timedelta(seconds=1))  # BUG
    elif dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)


@broken(n=2)
def retry_of_recv_shifts():
    """After a time-out rank 0 posts a second irecv; the one message fills the first. Report: rank 0's second irecv (this line) waits;
    the first irecv, given up after 1 s, has taken the message."""
    if dist.get_rank() == 1:
        time.sleep(2)
        dist.send(torch.ones(1), 0)
        return
    t = torch.zeros(1)
    while True:
        try:
            dist.irecv(t, 1).wait(timedelta(seconds=1))  # BUG
            break
        except RuntimeError:
            pass
    return t.item()


@broken(n=3)
def any_source_takes_data_for_config():
    """Rank 0 expects the configuration (3,) first, from anyone; rank 2's data (2,) comes earlier. Report: recv from any at this line
    got rank 2's (2,); name the source or use tags."""
    r = dist.get_rank()
    if r == 0:
        dist.recv(torch.zeros(3))  # BUG
        dist.recv(torch.zeros(2))
    elif r == 1:
        time.sleep(0.1)
        dist.send(torch.ones(3), 0)
    else:
        dist.send(torch.ones(2), 0)


@broken(n=3)
def any_source_then_named():
    """recv from anyone takes rank 1's only message, the recv from 1 after it waits for ever, and rank 2 waits in send. Report: rank
    0's first recv from any has taken rank 1's message; rank 2's send to 0 is not received."""
    r = dist.get_rank()
    if r == 0:
        dist.recv(torch.zeros(1))  # BUG
        dist.recv(torch.zeros(1), 1)
    else:
        if r == 2:
            time.sleep(0.1)
        dist.send(torch.ones(1), 0)


@broken(n=2)
def tags_of_weight_and_bias_swapped():
    """Weight (4,) goes with tag 1, bias (2,) with tag 2; the receiver has swapped the tags. Report: tag 1: (4,) sent, (2,) expected:
    the tags are swapped on rank 1."""
    w, b = torch.ones(4), torch.ones(2)
    if dist.get_rank() == 0:
        works = [dist.isend(w, 1, tag=1), dist.isend(b, 1, tag=2)]
    else:
        works = [dist.irecv(w, 0, tag=2), dist.irecv(b, 0, tag=1)]  # BUG
    for x in works:
        x.wait()


@broken(n=2)
def tags_per_layer_reversed():
    """Gradients go from the last layer to the first (tags 2, 1, 0) and are received from the first to the last, all blocking. Report:
    crossing tags: the same order on both sides, or isend; not 'the same tag'."""
    t = torch.ones(1)
    for i in range(3):
        if dist.get_rank() == 0:
            dist.send(t, 1, tag=2 - i)
        else:
            dist.recv(t, 0, tag=i)  # BUG


# ---------------------------------------------------------------- uneven splits, objects
@broken()
def moe_counts_not_exchanged():
    """MoE: rank r sends r + 1 tokens to everybody, and everybody expects its own number from all. Report: rank 0 sends rank 1 1 row,
    rank 1 expects 2: exchange the counts first."""
    n = dist.get_rank() + 1
    x = torch.ones(4 * n, 3)
    dist.all_to_all_single(torch.zeros(4 * n, 3), x, [n] * 4, [n] * 4)  # BUG


@broken()
def gather_list_of_own_size():
    """The root makes its gather_list of its own size; rank 3 has one row less. Report: gather: (2, 2) expected from rank 3, which gives
    (1, 2)."""
    x = torch.ones(1 if dist.get_rank() == 3 else 2, 2)
    dist.gather(x, [torch.zeros(2, 2) for _ in range(4)] if dist.get_rank() == 0 else None, dst=0)  # BUG


@broken()
def broadcast_object_with_lock():
    """Rank 0 broadcasts a config that holds a lock. Report: rank 0: TypeError: cannot pickle lock, this line; the others wait in the
    broadcast."""
    objs = [{"lr": 1, "lock": threading.Lock()} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(objs, src=0)  # BUG


@broken()
def object_error_swallowed():
    """all_gather_object of an open generator on rank 1 fails, is swallowed, and rank 1 goes on to the barrier. Report: rank 1's
    all_gather_object raised TypeError at this line and was caught; the others wait in it."""
    out = [None] * 4
    try:
        dist.all_gather_object(out, (i for i in range(3)) if dist.get_rank() == 1 else 1)  # BUG
    except TypeError:
        pass
    dist.barrier()


@broken(n=2)
def object_list_lengths_p2p():
    """send_object_list of two objects, recv_object_list of three. Report: 2 objects sent, 3 expected; lines."""
    if dist.get_rank() == 0:
        dist.send_object_list(["a", "b"], 1)
    else:
        dist.recv_object_list([None] * 3, 0)  # BUG


@broken()
def gather_object_list_on_all():
    """gather_object with an output list on all ranks. Report: only dst gives a list: ranks 1-3, this line."""
    dist.gather_object(dist.get_rank(), [None] * 4, dst=0)  # BUG
