"""Broken programs, fourth list."""

import os, tempfile, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from registry import broken


@broken()
def w_ring_batch_wrong_recv_peer():
    """Ring exchange as a batch: receives from r+1 instead of r-1 (both directions the same). Good: every rank sends to r+1 and
    receives from r+1; nobody matches; line of batch / of the irecv op; 'receive from r-1'."""
    r, n = dist.get_rank(), dist.get_world_size()
    out, inp = torch.full((2,), float(r)), torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, out, (r + 1) % n),
        dist.P2POp(dist.irecv, inp, (r + 1) % n),  # BUG
    ]
    for w in dist.batch_isend_irecv(ops):
        w.wait()
    return inp.tolist()


@broken(n=3)
def w_halo_edge_not_skipped_on_last():
    """Halo exchange without periodic boundary: last rank forgot to skip its right neighbour and uses % n. Good: rank 2 sends
    to/receives from rank 0, which has no such counterpart; line of the ops."""
    r, n = dist.get_rank(), dist.get_world_size()
    row, left, right = torch.ones(3), torch.zeros(3), torch.zeros(3)
    ops = []
    if r > 0:
        ops += [dist.P2POp(dist.isend, row, r - 1), dist.P2POp(dist.irecv, left, r - 1)]
    nxt = (r + 1) % n
    if nxt < n:
        ops += [dist.P2POp(dist.isend, row, nxt), dist.P2POp(dist.irecv, right, nxt)]  # BUG
    for w in dist.batch_isend_irecv(ops):
        w.wait()


@broken(n=2)
def w_tag_of_step_off_by_one():
    """Sender tags with step+1, receiver with step. Good: rank 1 waits for tag 0 from rank 0, rank 0 sends tags 1..; tags differ."""
    t = torch.zeros(1)
    for step in range(3):
        if dist.get_rank() == 0:
            dist.send(t + step, 1, tag=step + 1)  # BUG
        else:
            dist.recv(t, 0, tag=step)


@broken()
def w_group_rank_as_dst():
    """gather in a group of ranks 2,3 with dst=0 (the group rank instead of the global one). Good: dst 0 is not in the group
    (2,3); use dst=2 or group_dst=0; line of gather."""
    g = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        t = torch.ones(1)
        dist.gather(t, [torch.zeros(1) for _ in range(2)] if dist.get_rank(g) == 0 else None, dst=0, group=g)  # BUG


@broken()
def w_new_group_only_by_members():
    """Only members create the group. Good: ranks 0,1 wait in new_group for 2,3 (default group call); all ranks must call it."""
    if dist.get_rank() < 2:
        g = dist.new_group([0, 1])  # BUG
        dist.all_reduce(torch.ones(1), group=g)
    dist.barrier()


@broken()
def w_early_stop_local_decision():
    """Early stopping decided on each rank's own validation loss. Good: rank 2 stopped after step 2 (break line) and is in the final
    barrier; others in all_reduce of step 3."""
    best, bad = 1e9, 0
    losses = [5.0, 4.0, 3.0, 2.0] if dist.get_rank() != 2 else [5.0, 6.0, 7.0, 8.0]
    for loss in losses:
        g = torch.tensor([loss])
        dist.all_reduce(g)
        bad = bad + 1 if loss >= best else 0
        best = min(best, loss)
        if bad == 2:
            break  # BUG
    dist.barrier()


@broken(n=2)
def w_oom_swallowed_then_next_batch():
    """train step catches an OOM RuntimeError and `continue`s, DDP. Good: rank 1 skipped a backward (caught RuntimeError at the except), is
    one backward behind and has gone; rank 0 waits in backward of last batch."""
    net = DDP(nn.Linear(4, 4))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for i in range(4):
        try:
            if i == 2 and dist.get_rank() == 1:
                raise RuntimeError("out of memory")  # BUG
            net(torch.ones(2, 4)).sum().backward()
            opt.step()
        except RuntimeError:
            opt.zero_grad()
            continue


@broken(n=2)
def w_barrier_in_finally():
    """Exception on rank 1 in the loop; finally: barrier; except outside swallows and returns. Good: rank 1's ValueError (line), its finally
    barrier met rank 0's all_reduce."""
    try:
        for i in range(3):
            if i == 1 and dist.get_rank() == 1:
                raise ValueError("bad sample 17")  # BUG
            dist.all_reduce(torch.ones(2))
    except ValueError:
        return "skipped"
    finally:
        dist.barrier()


@broken(n=2)
def w_fsdp_frozen_on_one_rank():
    """Rank 1 freezes the first layer (wrong config); fully_shard on each layer. Good: reduce_scatter on rank 0 for the layer that is
    frozen on rank 1; line of backward; name FSDP."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if dist.get_rank() == 1:
        net[0].requires_grad_(False)  # BUG
    for m in net:
        fully_shard(m)
    fully_shard(net)
    net(torch.ones(2, 8)).sum().backward()
    dist.barrier()


@broken(n=2)
def w_fsdp_clip_grad_on_rank0():
    """clip_grad_norm_ with FSDP on rank 0 only (for logging). Good: rank 0 all_reduce in clip_grad_norm_ (DTensor) at this line; rank 1 in
    the next step's forward / barrier."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
        if dist.get_rank() == 0:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()  # BUG
            print(float(norm))
        opt.step()
        opt.zero_grad()


@broken(n=2)
def w_fsdp_optimizer_before_shard():
    """Optimizer made before fully_shard: holds the old parameters, nothing is learnt. Good: (silent) assertion line at best."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    opt = torch.optim.SGD(net.parameters(), 0.1)  # BUG
    fully_shard(net)
    before = net.weight.full_tensor().clone()
    net(torch.ones(2, 8)).sum().backward()
    opt.step()
    assert not torch.equal(before, net.weight.full_tensor()), "nothing learnt"


@broken(n=2)
def w_checkpoint_dir_per_rank():
    """Each rank makes its own temporary directory for dcp and rank 1 loads from its own path, which has no metadata. Good: rank 1
    CheckpointException: .metadata missing at its path; line of load."""
    import torch.distributed.checkpoint as dcp
    path = tempfile.mkdtemp()  # BUG
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    w = {"w": torch.zeros(2)}
    dcp.load(w, checkpoint_id=path)
    return w["w"].tolist()


@broken(n=2)
def w_resume_epoch_only_on_rank0():
    """Only rank 0 reads the checkpoint's epoch; others start at 0. Good: rank 0 makes 1 epoch and returned; rank 1 waits in call 2;
    'fewer batches'."""
    start = 0
    if dist.get_rank() == 0:
        start = 2  # BUG
    for epoch in range(start, 3):
        t = torch.tensor([float(epoch)])
        dist.all_reduce(t)
    return t.item()


@broken()
def w_elastic_round_key_reused():
    """Hand-made store barrier whose counter key is reused in the second round: 2nd round passes at once, so values are stale -> rank
    reads a key not yet set and waits? Here: leader waits for count == n in round 2, but it is 2n. Good: key 'arrived' stays 8; line of the poll."""
    store = dist.distributed_c10d._get_default_store()
    n = dist.get_world_size()
    for rnd in range(2):
        store.add("arrived", 1)
        if dist.get_rank() == 0:
            while store.add("arrived", 0) != n:  # BUG
                time.sleep(0.01)
            store.set(f"go-{rnd}", "1")
        store.wait([f"go-{rnd}"])


@broken()
def w_elastic_generation_mismatch():
    """Rank 3 'rejoins' with an old generation number and waits for its go key. Good: rank 3 waits for 'gen-1/go'; set is 'gen-2/go' by rank 0;
    others in barrier."""
    store = dist.distributed_c10d._get_default_store()
    r = dist.get_rank()
    gen = 1 if r == 3 else 2  # BUG
    if r == 0:
        store.set(f"gen-{gen}/go", "1")
    else:
        store.get(f"gen-{gen}/go")
    dist.barrier()


@broken(n=3)
def w_leader_broadcast_before_store_set():
    """Leader broadcasts (collective) before it sets the key which the others read before they join. Good: ranks 1,2 wait for key
    'world'; rank 0 would set it (line) but waits in broadcast."""
    store = dist.distributed_c10d._get_default_store()
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.broadcast(t, 0)  # BUG
        store.set("world", "3")
    else:
        int(store.get("world"))
        dist.broadcast(t, 0)


@broken()
def w_pipeline_1f1b_last_stage_sends_grad_twice():
    """Hand-made pipeline; the last stage sends its gradient twice. Good: rank 3's second send to rank 2 (line) has no recv; rank 2
    returned."""
    r, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(2)
    if r > 0:
        dist.recv(x, r - 1)
    if r < n - 1:
        dist.send(x, r + 1)
        dist.recv(x, r + 1)
    if r > 0:
        dist.send(x, r - 1)
    if r == n - 1:
        dist.send(x, r - 1)  # BUG


@broken()
def w_all_to_all_tokens_not_exchanged():
    """MoE dispatch: the receive splits are the send splits (sizes were not exchanged). Good: rank 0 sends 3 to rank 1, which expects 1; line."""
    r, n = dist.get_rank(), dist.get_world_size()
    send = [3 if (r + j) % 2 and r == 0 else 1 for j in range(n)]
    x = torch.ones(sum(send))
    out = torch.zeros(sum(send))
    dist.all_to_all_single(out, x, send, send)  # BUG


@broken(n=2)
def w_two_threads_one_group():
    """A metrics thread all-reduces in the default group while the main thread trains (rank-dependent timing). Good: the ranks' threads
    meet in different order: thread named, line; give the thread a group of its own."""
    done = []
    def metrics():
        time.sleep(0.05 if dist.get_rank() == 0 else 0.25)
        m = torch.ones(2)
        dist.all_reduce(m)  # BUG
        done.append(m)
    th = threading.Thread(target=metrics)
    th.start()
    for _ in range(4):
        time.sleep(0.1)
        dist.all_reduce(torch.ones(5))
    th.join()


@broken(n=3)
def w_scheduler_dict_order():
    """Gradients are all-reduced in the order of a set/dict that differs per rank. Good: rank 1's call 1 has shape of 'b', others of 'a';
    same order."""
    grads = {"a": torch.ones(2), "b": torch.ones(2, 2), "c": torch.ones(3)}
    names = list(grads) if dist.get_rank() != 1 else sorted(grads, key=lambda k: grads[k].numel(), reverse=True)
    for k in names:
        dist.all_reduce(grads[k])  # BUG


@broken(n=2)
def w_isend_never_received_async():
    """Rank 0 isends a stop signal that rank 1 never receives; waits. Good: rank 0 waits for its isend (line) for rank 1 to receive;
    rank 1 has returned. (gloo: hangs or passes for small ones)"""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.send(t, 1)
        stop = dist.isend(torch.full((1,), -1.0), 1)  # BUG
        stop.wait()
    else:
        for _ in range(2):
            dist.recv(t, 0)


@broken(n=4)
def w_tp_dp_wrong_group():
    """Rank 2 uses the tp group for the gradient all-reduce instead of dp. Good: rank 2 in group (2,3), rank 0 waits for 2 in (0,2); line; wrong
    group?"""
    r = dist.get_rank()
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][r // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][r % 2]
    t = torch.ones(1)
    dist.all_reduce(t, group=tp)
    dist.all_reduce(t, group=tp if r == 2 else dp)  # BUG


import os, tempfile, threading, time, contextlib
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from registry import broken


@broken()
def x_wait_only_first_of_works():
    """Pipelined async all_reduces; rank 2 returns after the first batch since `return` is indented too deep. Good: rank 2 returned at
    the return line after n calls; 0,1,3 wait in call."""
    works = []
    for i in range(3):
        works.append(dist.all_reduce(torch.ones(2), async_op=True))
        if dist.get_rank() == 2:
            works[-1].wait
            return i  # BUG
    for w in works:
        w.wait()


@broken(n=2)
def x_except_returns_default():
    """helper swallows an exception of a parse and returns None; the caller skips the collective. Good: rank 1 returned/in barrier; the
    except in helper (line) hid a ValueError."""
    def load(r):
        try:
            return torch.tensor([float("1.5" if r == 0 else "n/a")])  # BUG
        except ValueError:
            return None
    t = load(dist.get_rank())
    if t is not None:
        dist.all_reduce(t)
    dist.barrier()


@broken(n=2)
def x_group_timeout_peer_computes_file():
    """group limit 1 s; rank 1 first waits 5 s (download) then calls. Good: rank 0 timed out, rank 1 is still asleep at this line."""
    g = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    for i in range(3):
        if dist.get_rank() == 1 and i == 2:
            time.sleep(5)  # BUG
        dist.all_reduce(torch.ones(1), group=g)


@broken()
def x_scan_order_send_before_recv_all():
    """All ranks send (blocking) to right, then receive from left. gloo hangs for big ones/rendezvous. Good: cycle of sends; reorder."""
    r, n = dist.get_rank(), dist.get_world_size()
    t, u = torch.ones(1 << 20), torch.zeros(1 << 20)
    dist.send(t, (r + 1) % n)  # BUG
    dist.recv(u, (r - 1) % n)


@broken()
def x_batch_one_rank_forgets_batch_part():
    """Halo exchange via isend/irecv: rank 1 forgets its irecv from the right. Good: rank 2's isend to rank 1 is never received (line), who
    waits; rank 1 has no recv from 2."""
    r, n = dist.get_rank(), dist.get_world_size()
    works, row = [], torch.ones(2)
    if r > 0:
        works += [dist.isend(row, r - 1), dist.irecv(torch.zeros(2), r - 1)]
    if r < n - 1:
        works += [dist.isend(row, r + 1)]
        if r != 1:
            works += [dist.irecv(torch.zeros(2), r + 1)]  # BUG
    for w in works:
        w.wait()
    dist.barrier()


@broken(n=3)
def x_irecv_any_source_twice():
    """Master receives from any source three times, but there are two workers. Good: rank 0 waits in recv from any, ranks 1,2 returned."""
    if dist.get_rank() == 0:
        t = torch.zeros(1)
        for _ in range(3):
            dist.recv(t)  # BUG
    else:
        dist.send(torch.ones(1), 0)


@broken(n=2)
def x_store_num_keys_wait():
    """Rank 0 waits in a loop until check(['ready/1']) but rank 1 sets 'ready/0' (wrong index). Good: rank 0 polls check for 'ready/1';
    there is 'ready/0' set by rank 1 (line)."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        s.set("ready/0", "1")  # BUG
    else:
        while not s.check(["ready/1"]):
            time.sleep(0.01)
    dist.barrier()


@broken(n=2)
def x_store_compare_set_wrong_expected():
    """Leader election by compare_set with the wrong expected value: nobody becomes leader; both wait for 'leader-addr'. Good: key never set."""
    s = dist.distributed_c10d._get_default_store()
    r = dist.get_rank()
    s.set("leader", "")
    dist.barrier()
    if s.compare_set("leader", "none", str(r)) == str(r).encode():  # BUG
        s.set("leader-addr", f"host{r}")
    return s.get("leader-addr")


@broken()
def x_dead_worker_before_new_world():
    """Elastic: rank 3 raises and swallows, survivors build a new group of 0..2 but use the old one in one place. Good: ranks 0-2 all_reduce
    in world, rank 3 returned at line; is group= missing?"""
    r = dist.get_rank()
    alive = dist.new_group([0, 1, 2])
    try:
        if r == 3:
            raise ConnectionError("lost node")
    except ConnectionError:
        return "gone"
    t = torch.ones(1)
    dist.all_reduce(t, group=alive)
    dist.broadcast(t, 0)  # BUG


@broken(n=2)
def x_fsdp_layer_skipped():
    """Early exit network: rank 1 stops after the first layer. Good: rank 0 all_gather of layer 1, rank 1 in reduce_scatter / backward."""
    from torch.distributed.fsdp import fully_shard
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        def forward(self, x):
            for i, m in enumerate(self.layers):
                x = m(x)
                if i == 0 and dist.get_rank() == 1:
                    return x  # BUG
            return x
    net = Net()
    for m in net.layers:
        fully_shard(m)
    fully_shard(net)
    net(torch.ones(2, 8)).sum().backward()


@broken(n=2)
def x_fsdp_eval_generate_uneven():
    """Generation with FSDP: each rank stops at its own end token. Good: rank 0 in forward (all_gather), rank 1 left the loop and is in
    barrier."""
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    x = torch.ones(1, 8)
    for step in range(5):
        with torch.no_grad():
            x = net(x)
        if step == (4 if dist.get_rank() == 0 else 2):
            break  # BUG
    dist.barrier()


@broken(n=2)
def x_dcp_state_dict_differs():
    """get_state_dict on rank 0 only before dcp.save. Good: rank 0 in get_model_state_dict's gather (line), rank 1 in dcp.save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    net = nn.Linear(8, 8)
    fully_shard(net)
    if dist.get_rank() == 0:
        sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))  # BUG
        torch.save(sd, os.path.join(tempfile.mkdtemp(), "m.pt"))
    dist.barrier()


@broken(n=2)
def x_load_map_only_rank0_then_broadcast_missing_key():
    """Rank 0 loads a checkpoint with one key more, and all broadcast each tensor of their own state dict. Good: rank 0 has one broadcast
    more: rank 1 returned; line of the loop."""
    sd = {"w": torch.zeros(2), "b": torch.zeros(2)}
    if dist.get_rank() == 0:
        sd["ema"] = torch.ones(2)  # BUG
    for k in sorted(sd):
        dist.broadcast(sd[k], 0)
    return {k: x.tolist() for k, x in sd.items()}


@broken(n=4)
def x_subgroup_barrier_swapped():
    """Tensor and data groups: rank 3 does barrier(dp) before all_reduce(tp). Good: cycle with groups; line."""
    r = dist.get_rank()
    gs = [dist.new_group(x) for x in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = gs[r // 2], gs[2 + r % 2]
    if r == 3:
        dist.barrier(group=dp)  # BUG
        dist.all_reduce(torch.ones(1), group=tp)
    else:
        dist.all_reduce(torch.ones(1), group=tp)
        dist.barrier(group=dp)


@broken(n=2)
def x_lock_held_over_collective():
    """A worker thread holds a lock while it waits for a message; main needs the lock to send it. Good: rank 0's main waits for the lock (line) held
    by thread (line), which waits in recv from 1, etc."""
    lock = threading.Lock()
    r, t = dist.get_rank(), torch.zeros(1)
    started = threading.Event()
    def rx():
        with lock:
            started.set()
            dist.recv(t, 1 - r)  # BUG
    th = threading.Thread(target=rx)
    th.start()
    started.wait()
    with lock:
        dist.send(torch.ones(1), 1 - r)
    th.join()


@broken(n=2)
def x_join_of_unequal_plain():
    """Uneven shards with padding forgotten: ranks have 3 and 4 batches, hand-made DDP (grad all-reduce). Good: rank 1's call 7 (last batch); rank 0
    returned; fewer batches."""
    net = nn.Linear(2, 2)
    data = [torch.ones(1, 2)] * 7
    for x in data[dist.get_rank()::2]:  # BUG
        net.zero_grad()
        net(x).sum().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)


@broken(n=2)
def x_reduce_op_differs():
    """Rank 0 averages with SUM, rank 1 uses MAX. Good: all_reduce with op SUM on 0, MAX on 1; line."""
    t = torch.ones(2)
    dist.all_reduce(t, op=dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)  # BUG


@broken(n=3)
def x_src_differs():
    """Each rank broadcasts from 'its' leader. Good: broadcast with src 0 on 0,1 and src 2 on 2."""
    t = torch.ones(2)
    dist.broadcast(t, src=2 if dist.get_rank() == 2 else 0)  # BUG


@broken(n=2)
def x_no_grad_param_order():
    """Parameters registered in another order on rank 1: bucketed flatten has the same total, shapes swap: silently wrong; here cat sizes
    equal. Good: nothing can be seen but an assertion at this line."""
    a, b = torch.full((2,), 1.0), torch.full((3,), 2.0)
    flat = torch.cat([a, b] if dist.get_rank() == 0 else [b, a])  # BUG
    dist.all_reduce(flat)
    assert torch.equal(flat[:2], 2 * a), f"gradient of a is {flat[:2].tolist()}"


@broken(n=2)
def x_object_gather_in_logging_level():
    """A debug log (rank 0 has DEBUG on) gathers objects before the loss all_reduce. Good: all_gather_object on rank 0 (line in log), all_reduce on 1."""
    def log(loss):
        if dist.get_rank() == 0:
            out = [None] * 2
            dist.all_gather_object(out, loss)  # BUG
    t = torch.ones(1)
    log(1.0)
    dist.all_reduce(t)


import threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from registry import broken

@broken(n=3)
def y_timeout_of_three():
    """Like 120 with three ranks: rank 1 sleeps, rank 2 waits. Good: rank 1 sleeps at its line."""
    g = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)  # BUG
    dist.all_reduce(torch.ones(1), group=g)

@broken(n=3)
def y_error_while_other_sleeps():
    """Rank 0 raises because rank 1 is late. Good: others with places: rank 1 sleeps at its line."""
    ev = threading.Event()
    if dist.get_rank() == 1:
        time.sleep(3)  # BUG
    if dist.get_rank() == 0:
        time.sleep(1)
        raise RuntimeError("worker 1 is late")
    dist.barrier()

@broken(n=2)
def y_except_before_call_same_function():
    """ValueError caught in the same function, before and outside the collective. Good: rank 1 caught ValueError at this except."""
    ok = True
    try:
        float("1" if dist.get_rank() == 0 else "n/a")  # BUG
    except ValueError:
        ok = False
    if ok:
        dist.all_reduce(torch.ones(1))
    dist.barrier()

@broken(n=2)
def y_finally_with_pass():
    """except: pass, then a barrier. Good: the except."""
    try:
        for i in range(2):
            if i == 1 and dist.get_rank() == 1:
                raise ValueError("bad sample 17")  # BUG
            dist.all_reduce(torch.ones(2))
    except ValueError:
        pass
    dist.barrier()

@broken(n=2)
def y_store_wait_counter_family():
    """Rank 1 stops one step early (store). Good: rank 1 returned, key of step 2 is rank 1's."""
    s = dist.distributed_c10d._get_default_store()
    r = dist.get_rank()
    for i in range(3 - r):
        s.set(f"done/{r}/{i}", "1")  # BUG
        s.get(f"done/{1 - r}/{i}")
