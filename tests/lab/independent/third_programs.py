"""Broken programs, third list: some of them look for the weak spots of earlier reports."""

import os, threading, time, queue
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from registry import broken


@broken(n=4)
def eval_ddp_on_rank0_only():
    """Rank 0 alone evaluates through the DDP module (BatchNorm, train mode), the others go to the barrier. Good: rank 0 is in DDP's
    forward (buffer broadcast) at this line, ranks 1-3 in barrier: use model.module or all ranks."""
    m = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    m(torch.ones(8, 4)).sum().backward()
    if dist.get_rank() == 0:
        m(torch.ones(8, 4))  # BUG
    dist.barrier()


@broken(n=4)
def nan_batch_skips_backward():
    """Rank 2 skips backward for a NaN loss and goes on. Good: rank 2 has left out one backward/gradient all-reduce (it is one step
    ahead or has returned), the others wait in backward at their line."""
    m = DDP(nn.Linear(4, 1))
    for step in range(3):
        loss = m(torch.ones(2, 4)).sum()
        if step == 1 and dist.get_rank() == 2:
            loss = loss * float("nan")
        if torch.isnan(loss):
            continue  # BUG
        loss.backward()


@broken(n=2)
def ddp_layer_frozen_on_one():
    """Rank 1 freezes a layer before DDP: its parameter list differs. Good: DDP's parameter check: rank 1 has 2 parameters with grad,
    rank 0 has 4, at the DDP line."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if dist.get_rank() == 1:
        net[0].requires_grad_(False)
    m = DDP(net)  # BUG
    m(torch.ones(2, 4)).sum().backward()


@broken(n=4)
def full_tensor_on_rank0():
    """dt.full_tensor() for logging on rank 0 only. Good: rank 0 waits in all_gather called by full_tensor at this line (user's line!),
    others have returned."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (4,))
    dt = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    if dist.get_rank() == 0:
        print(dt.full_tensor().sum().item())  # BUG


@broken(n=4)
def mesh_dim_swapped():
    """2x2 mesh; ranks 0 and 1 reduce over 'tp' then 'dp', ranks 2 and 3 over 'dp' then 'tp'. Good: which rank waits on which group; order of groups differs."""
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = ["tp", "dp"] if dist.get_rank() < 2 else ["dp", "tp"]
    t = torch.ones(2)
    for nm in names:
        dist.all_reduce(t, group=mesh.get_group(nm))  # BUG


@broken(n=2)
def pipeline_microbatches_differ():
    """GPipe with 4 micro-batches on stage 0 and 2 on stage 1. Good: rank 0 sends its third micro-batch / rank 1 has returned after 2
    (or shape mismatch); n_microbatches differ."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    r = dist.get_rank()
    st = PipelineStage(nn.Linear(4, 4), r, 2, torch.device("cpu"))
    sch = ScheduleGPipe(st, n_microbatches=4 if r == 0 else 2, loss_fn=nn.MSELoss())  # BUG
    if r == 0:
        sch.step(torch.ones(8, 4))
    else:
        sch.step(target=torch.ones(8, 4))


@broken(n=4)
def broadcast_object_only_src():
    """Only rank 0 calls broadcast_object_list; the others just read their list. Good: rank 0 waits in broadcast (broadcast_object_list
    at this line), 1-3 failed or returned: they must call too."""
    cfg = [{"lr": 0.1}] if dist.get_rank() == 0 else [None]
    if dist.get_rank() == 0:
        dist.broadcast_object_list(cfg, src=0)  # BUG
    return cfg[0]["lr"]


@broken(n=4)
def object_list_lengths_differ():
    """broadcast_object_list with 2 objects on rank 0 and a list of 1 on the others. Good: number of objects 2 on rank 0, 1 on 1-3."""
    objs = [{"a": 1}, "x"] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(objs, src=0)  # BUG
    return objs


@broken(n=3)
def unpicklable_object():
    """Rank 1 gathers an object with a lambda. Good: rank 1's pickle error at this line; the others wait in all_gather_object."""
    o = {"metric": 1.0}
    if dist.get_rank() == 1:
        o["fn"] = lambda x: x
    out = [None] * 3
    dist.all_gather_object(out, o)  # BUG
    return len(out)


@broken(n=4)
def store_counter_wrong_total():
    """Own barrier with store.add: waits until the count is world_size + 1 (off by one). Good: all ranks poll the counter 'n' that
    stays at 4; line; nobody else will add."""
    store = dist.distributed_c10d._get_default_store()
    store.add("n", 1)
    while store.add("n", 0) <= dist.get_world_size():  # BUG
        time.sleep(0.005)


@broken(n=2)
def store_get_with_own_prefix():
    """Rank 0 writes through a PrefixStore, rank 1 reads the raw store. Good: rank 1 waits for 'job/addr'-less key 'addr', and there
    is a key 'job/addr' set by rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        dist.PrefixStore("job", store).set("addr", "x")
    else:
        store.get("addr")  # BUG


@broken(n=4)
def leaf_parameter_averaged_in_place():
    """Averages parameters themselves with /= outside no_grad. Good: RuntimeError leaf variable in-place, this line."""
    m = nn.Linear(2, 2)
    for p in m.parameters():
        dist.all_reduce(p.data)
        p /= dist.get_world_size()  # BUG


@broken(n=2)
def recv_into_column():
    """recv into a column of a matrix (not contiguous). Good: rank 1's recv needs a contiguous tensor, line; use a buffer and copy."""
    m = torch.zeros(3, 3)
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(m[:, 1], 0)  # BUG
    return m.tolist()


@broken(n=4)
def group_rank_minus_one():
    """A non-member uses dist.get_rank(group) == -1 as the index of its shard, the last one: silently takes another's shard; then the ring in
    the group sends to (−1+1)%2. Good: rank 2 (not in group) ... send on a group it is not a member of, this line."""
    g = dist.new_group([0, 1])
    gr = dist.get_rank(g)
    t = torch.zeros(1)
    w = dist.isend(torch.ones(1), (gr + 1) % 2, group=g)  # BUG
    dist.recv(t, (gr - 1) % 2, group=g)
    w.wait()


@broken(n=4)
def random_layer_drop_unseeded():
    """Stochastic depth decided per rank by a rank-seeded generator: in DDP without find_unused_parameters the ranks leave other parameters
    unused. Good: which rank didn't finish its gradient reduction / unused parameters, at the second forward of it or backward wait."""
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        def forward(self, x):
            x = self.a(x)
            return x if dist.get_rank() == 1 else self.b(x)  # BUG
    m = DDP(M())
    for _ in range(2):
        m(torch.ones(2, 4)).sum().backward()


@broken(n=4)
def early_stop_flag_only_rank0():
    """Rank 0 decides to stop early and breaks without telling the others. Good: rank 0 left the loop (line) and is in the final barrier,
    1-3 wait in the gradient all-reduce of step 3."""
    g = torch.ones(8)
    for step in range(5):
        dist.all_reduce(g)
        if dist.get_rank() == 0 and step == 2:
            break  # BUG
    dist.barrier()


@broken(n=4)
def avg_of_integers():
    """all_reduce with AVG of an int tensor. Good: error on this line: AVG isn't available for ints/gloo."""
    n = torch.tensor(dist.get_rank())
    dist.all_reduce(n, op=dist.ReduceOp.AVG)  # BUG
    return n.item()


@broken(n=3)
def async_isend_buffer_from_generator():
    """Prefetch thread and main both use the world: main all-reduces while the thread broadcasts the next batch; on rank 2 main is slower.
    Good: operation mismatch broadcast/all_reduce with thread names: own group per thread."""
    stop = 3
    def prefetch():
        for _ in range(stop):
            time.sleep(0.02 if dist.get_rank() < 2 else 0.0)
            dist.broadcast(torch.zeros(5), 0)  # BUG
    th = threading.Thread(target=prefetch, name="prefetch")
    th.start()
    for _ in range(stop):
        time.sleep(0.0 if dist.get_rank() < 2 else 0.02)
        dist.all_reduce(torch.ones(2))
    th.join()


@broken(n=2)
def worker_pool_map_hides_error():
    """executor.map, results never read: rank 0's upload fails before its send. Good: rank 1 waits in recv; rank 0's task raised
    FileNotFoundError at this line and nobody asked for the result."""
    from concurrent.futures import ThreadPoolExecutor
    if dist.get_rank() == 0:
        def up(i):
            os.stat("/no/such/file")  # BUG
            dist.send(torch.ones(1), 1)
        with ThreadPoolExecutor(2) as ex:
            ex.map(up, range(2))
    else:
        for _ in range(2):
            dist.recv(torch.zeros(1), 0)


@broken(n=2)
def queue_consumer_killed_by_error():
    """A consumer thread dies on a bad item, main fills the bounded queue and blocks in put. Good: main waits for room in the queue, line;
    thread 'consumer' ended with ValueError at this line."""
    q = queue.Queue(maxsize=2)
    def consumer():
        while True:
            x = q.get()
            if x == 1 and dist.get_rank() == 1:
                int("bad")  # BUG
            if x is None:
                return
    th = threading.Thread(target=consumer, name="consumer", daemon=True)
    th.start()
    for i in range(8):
        q.put(i)
    q.put(None)
    th.join()
    dist.barrier()


@broken(n=2)
def gradient_accumulation_no_sync_mismatch():
    """Rank 1 syncs every step, rank 0 only each second (no_sync from a rank-dependent setting). Good: rank 1 waits in backward of step 1 /
    rank 0 made fewer gradient all-reduces; both backward lines."""
    from contextlib import nullcontext
    m = DDP(nn.Linear(4, 1))
    acc = 2 if dist.get_rank() == 0 else 1
    for step in range(4):
        with (m.no_sync() if (step + 1) % acc else nullcontext()):  # BUG
            m(torch.ones(2, 4)).sum().backward()


@broken(n=4)
def monitored_barrier_missing():
    """Rank 3 skips the monitored barrier. Good: RuntimeError or a deadlock report that says: rank 3 is missing, it returned."""
    if dist.get_rank() != 3:
        dist.monitored_barrier(timeout=timedelta(seconds=2))  # BUG


@broken(n=2)
def irecv_handle_overwritten():
    """Waits only for the last of two irecvs, in a loop that overwrites the handle; uses the first buffer. Rank 0 sends only the
    second message's tag. Good: rank 1 waits for tag 1 ... / rank 0's send of tag 2 is never received."""
    if dist.get_rank() == 1:
        bufs = [torch.zeros(1), torch.zeros(1)]
        for i, b in enumerate(bufs):
            w = dist.irecv(b, 0, tag=i)
        w.wait()
    else:
        dist.send(torch.ones(1), 1, tag=0)
        dist.send(torch.ones(1), 1, tag=2)  # BUG


@broken(n=2)
def infinite_compute_on_one():
    """Rank 1 loops for ever in Python without communicating (a while with a wrong condition). Good: rank 1 is busy at this line (not
    waiting), rank 0 waits in all_reduce for it."""
    x = 1.0
    if dist.get_rank() == 1:
        while x != 0.3:
            x += 0.1  # BUG
    dist.all_reduce(torch.tensor(x))


@broken(n=4)
def zero_optimizer_consolidate_rank0():
    """ZeroRedundancyOptimizer.consolidate_state_dict called on rank 0 only (as saving on rank 0). Good: rank 0 waits in its broadcast
    at this line, others in barrier: all ranks must call."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    m = nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.1)
    m(torch.ones(1, 4)).sum().backward()
    opt.step()
    if dist.get_rank() == 0:
        opt.consolidate_state_dict(to=0)  # BUG
    dist.barrier()


@broken(n=4)
def fsdp_clip_on_rank0():
    """FSDP2: grad norm logged (clip_grad_norm_ + full_tensor) on rank 0 only. Good: rank 0 waits in all_reduce made by this line; the
    others are at the next all_gather/have returned."""
    from torch.distributed.fsdp import fully_shard
    m = nn.Linear(8, 8)
    fully_shard(m)
    m(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 0:
        n = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        print(n.full_tensor())  # BUG
    m(torch.ones(2, 8)).sum().backward()


@broken(n=4)
def gather_object_list_everywhere_missing():
    """gather_object with dst=3 but the list only on rank 0. Good: rank 0 gave a list though it isn't dst, or rank 3 has none; line."""
    out = [None] * 4 if dist.get_rank() == 0 else None
    dist.gather_object({"r": dist.get_rank()}, out, dst=3)  # BUG
    return out


@broken(n=4)
def butterfly_wrong_partner():
    """Butterfly exchange with r + 2**k instead of r ^ 2**k. Good: rank pairs that don't face each other or rank out of range, line."""
    r = dist.get_rank()
    t = torch.ones(1) * r
    for k in range(2):
        p = (r + 2 ** k) % 4  # BUG
        u = torch.zeros(1)
        reqs = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, p), dist.P2POp(dist.irecv, u, p)])
        for q in reqs:
            q.wait()
        t = t + u
    return t.item()


@broken(n=4)
def leader_election_recv_from_self_excluded():
    """Leader collects from all ranks including itself with any-source count = world_size; the others wait for its reply.
    Good: rank 0 waits in its 4th recv from any rank; 1-3 wait for rank 0's reply: one recv too many."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size()):
            dist.recv(t)  # BUG
        for p in range(1, 4):
            dist.send(t, p)
    else:
        dist.send(t, 0)
        dist.recv(t, 0)


@broken(n=4)
def scatter_rows_not_split():
    """Source passes x.chunk(4) of 10 rows: the chunks have unequal sizes (3,3,3,1). Good: shapes of the list differ from the output, rank 0, line."""
    x = torch.arange(10.0)
    out = torch.zeros(3)
    dist.scatter(out, list(x.chunk(4)) if dist.get_rank() == 0 else None, src=0)  # BUG
    return out.tolist()


@broken(n=4)
def log_only_when_large():
    """The all_reduce for the log is under a data-dependent condition (max>...) that holds on ranks 2,3 only; then the next step's all_reduce has
    the same shape, so the pairing is shifted without a mismatch. Good: ranks 2,3 one call ahead: wait in call 4, ranks 0,1 returned after 3; lines of
    the shifted calls (call 2: line of log on 2,3, line of step on 0,1)."""
    x = torch.tensor(float(dist.get_rank()))
    for step in range(3):
        g = torch.tensor(1.0)
        dist.all_reduce(g)
        if step == 0 and x > 1.5:
            dist.all_reduce(x.clone())  # BUG


import os, threading, time, queue, asyncio, random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from registry import broken


@broken(n=4)
def mesh_dim_crossed():
    """2x2 mesh: ranks 0 and 3 reduce over 'tp' then 'dp', ranks 1 and 2 over 'dp' then 'tp': a cycle. Good: who waits on which group,
    mesh dimension names, same order."""
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = ["tp", "dp"] if dist.get_rank() in (0, 3) else ["dp", "tp"]
    for nm in names:
        dist.all_reduce(torch.ones(2), group=mesh.get_group(nm))  # BUG


@broken(n=3)
def shifted_by_debug_reduce():
    """Rank 1 has a leftover debug all_reduce of the same shape before the loop; all calls pair shifted, the end barrier meets all_reduce.
    Good: mismatch at call 5 AND that call 1 came from another line on rank 1 (line of the debug call)."""
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(4))  # BUG
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    dist.barrier()


@broken(n=2)
def future_of_send_never_asked():
    """Task fails in the pool on rank 1 (TypeError), future kept in a list but result() only after the recv that depends on it.
    Good: rank 0 waits in recv; rank 1's task failed: TypeError at this line."""
    pool = ThreadPoolExecutor(1)
    if dist.get_rank() == 1:
        fs = [pool.submit(lambda: dist.send(torch.ones(1) + "x", 0))]  # BUG
        u = torch.zeros(1)
        dist.recv(u, 0)
        [f.result() for f in fs]
    else:
        t = torch.zeros(1)
        dist.recv(t, 1)
        dist.send(t, 1)


@broken(n=2)
def asyncio_task_never_awaited():
    """asyncio: the task that sends is created, but the coroutine is never awaited (missing await). Good: rank 1 waits in recv, rank 0 has
    returned without communicating; (RuntimeWarning: coroutine 'push' was never awaited) line."""
    async def push():
        dist.send(torch.ones(1), 1)
    async def main():
        push()  # BUG
    if dist.get_rank() == 0:
        asyncio.run(main())
    else:
        dist.recv(torch.zeros(1), 0)


@broken(n=2)
def asyncio_blocking_call_in_loop():
    """asyncio: two coroutines, the blocking recv in the first keeps the loop from running the second, which sends what the peer needs
    first. Good: both ranks wait in recv on this line; the blocking call holds the event loop (task that sends hasn't run)."""
    peer = 1 - dist.get_rank()
    async def rx():
        dist.recv(torch.zeros(1), peer)  # BUG
    async def tx():
        dist.send(torch.ones(1), peer)
    async def main():
        await asyncio.gather(rx(), tx())
    asyncio.run(main())


@broken(n=3)
def random_order_of_peers():
    """Each rank visits its peers in random (rank-seeded) order with blocking send/recv pairs. Good: a cycle with who waits for whom; same order or batch."""
    r = dist.get_rank()
    peers = [p for p in range(3) if p != r]
    random.Random(r).shuffle(peers)
    if r == 0: peers = [1, 2]
    if r == 1: peers = [2, 0]
    if r == 2: peers = [0, 1]
    for p in peers:
        t = torch.zeros(1)
        if r < p:
            dist.send(torch.ones(1), p); dist.recv(t, p)  # BUG
        else:
            dist.recv(t, p); dist.send(torch.ones(1), p)  # BUG: the same


@broken(n=2)
def timeout_given_in_ms():
    """A recv with a work timeout of 50 microseconds/ms where the peer needs longer (unit confusion). Good: timeout error of the wait at this line
    after 0.05 s; rank 0 was in sleep at its line, not gone."""
    if dist.get_rank() == 1:
        w = dist.irecv(torch.zeros(1), 0)
        w.wait(timedelta(milliseconds=50))  # BUG
    else:
        time.sleep(1)
        dist.send(torch.ones(1), 1)


@broken(n=2)
def store_wait_times_out():
    """store.wait with a timeout for a key that rank 0 sets only after a barrier that rank 1 hasn't reached. Good: rank 1's timeout at this line or a deadlock:
    rank 0 waits in barrier for rank 1, rank 1 waits for key 'go', which rank 0 sets after its barrier."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        dist.barrier()
        store.set("go", "1")
    else:
        store.wait(["go"], timedelta(seconds=2))  # BUG
        dist.barrier()


@broken(n=2)
def nested_lock_not_reentrant():
    """A logger helper takes a Lock already held by the caller in the same thread. Good: the main thread waits for a lock that it holds itself: RLock; lines."""
    lock = threading.Lock()
    def log():
        with lock:  # BUG
            pass
    with lock:
        if dist.get_rank() == 1:
            log()
    dist.barrier()


@broken(n=4)
def unused_return_of_all_gather_single():
    """Only ranks with data take part: each rank makes new_group of the ranks it believes active; rank 3 believes [0,1,3], others [0,1,2,3].
    Good: new_group differs: rank 3 gave [0,1,3], the rest 0-3, line."""
    act = [0, 1, 3] if dist.get_rank() == 3 else [0, 1, 2, 3]
    g = dist.new_group(act)  # BUG
    dist.all_reduce(torch.ones(1), group=g)


@broken(n=4)
def reduce_scatter_list_order():
    """reduce_scatter with input list with 4 tensors of unequal size on rank 2. Good: rank 2's list: shapes; line."""
    ins = [torch.ones(2) for _ in range(4)]
    if dist.get_rank() == 2:
        ins[3] = torch.ones(3)
    dist.reduce_scatter(torch.zeros(2), ins)  # BUG


@broken(n=4)
def tree_reduce_wrong_level():
    """Tree reduce: at level 2 rank 2 sends to 0 but rank 1 (a leaf that should be done) waits for 3: wrong condition. Good: rank 1 waits for 3, which
    sends/has returned."""
    r = dist.get_rank()
    t = torch.ones(1)
    u = torch.zeros(1)
    for d in (1, 2):
        if r % (2 * d) == d:
            dist.send(t, r - d)
            if d == 2:
                return
        elif r % d == 0 or d == 2 and r == 1:
            if r + d < 4:
                dist.recv(u, r + d)  # BUG
                t += u


@broken(n=2)
def param_server_double_push():
    """Worker retries a push after a timeout of its own and thus sends twice; the server receives once and replies once. Good: rank 1 waits in its second send,
    rank 0 has returned after recv and send."""
    t = torch.ones(1)
    if dist.get_rank() == 0:
        dist.recv(t, 1)
        dist.send(t, 1)
    else:
        for attempt in range(2):
            dist.send(t, 0)  # BUG
        dist.recv(t, 0)


@broken(n=4)
def any_source_server_gets_control_message():
    """The server receives any-source updates of size 4; a client's final 'done' message has size 1, with the same tag. Good: size mismatch: rank 3 sends (1,), the server
    receives (4,), lines of both."""
    if dist.get_rank() == 0:
        b = torch.zeros(4)
        for _ in range(6):
            dist.recv(b)  # BUG
    else:
        dist.send(torch.ones(4), 0)
        dist.send(torch.ones(1), 0)


@broken(n=2)
def generator_dataset_ends_early():
    """StopIteration: next(it) without default on the shorter shard of rank 1, caught by a broad except that logs and breaks. Good: rank 1 caught StopIteration at this line and left
    the loop; rank 0 waits in all_reduce."""
    it = iter(range(3 if dist.get_rank() == 0 else 2))
    for step in range(3):
        try:
            next(it)  # BUG
        except Exception as e:
            str(e)
            break
        dist.all_reduce(torch.ones(1))


@broken(n=2)
def destroy_while_thread_communicates():
    """Main destroys the group while its heartbeat thread still waits in a recv. Good: thread's recv at this line is open while main destroyed the group at line.."""
    if dist.get_rank() == 1:
        th = threading.Thread(target=lambda: dist.recv(torch.zeros(1), 0), name="hb")  # BUG
        th.start()
        dist.destroy_process_group()
        th.join()


@broken(n=4)
def fsdp_eval_uneven():
    """FSDP2: eval loop with differing numbers of batches (rank 0 has one more). Good: rank 0 in FSDP's all_gather in forward at this line, others returned; equal number of forwards."""
    from torch.distributed.fsdp import fully_shard
    m = nn.Linear(8, 8)
    fully_shard(m)
    with torch.no_grad():
        for _ in range(2 + (dist.get_rank() == 0)):
            m(torch.ones(2, 8))  # BUG


@broken(n=2)
def send_on_pool_after_shutdown():
    """Submits a send after pool.shutdown. Good: RuntimeError cannot schedule new futures after shutdown, rank 0 line; rank 1 in recv."""
    if dist.get_rank() == 0:
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        pool.submit(dist.send, torch.ones(1), 1)  # BUG
    else:
        dist.recv(torch.zeros(1), 0)


@broken(n=4)
def all_gather_aliased_output():
    """out = [torch.zeros(2)] * 4: all four outputs are the same tensor; silently only the last rank's values. (gloo: also no failure.) Good: a warning; else assertion at this line."""
    out = [torch.zeros(2)] * 4
    dist.all_gather(out, torch.full((2,), float(dist.get_rank())))  # BUG
    assert [o[0].item() for o in out] == [0, 1, 2, 3], out


@broken(n=2)
def tensor_changed_before_isend_done():
    """isend and then buffer.zero_() before wait; the receiver gets zeros. Good: 'buffer changed between isend and wait' with line; else rank 1's assertion."""
    b = torch.ones(4)
    if dist.get_rank() == 0:
        w = dist.isend(b, 1)
        b.zero_()  # BUG
        w.wait()
    else:
        time.sleep(0.05)
        dist.recv(b, 0)
        assert b.sum().item() == 4, b


@broken(n=2)
def daemon_receiver_ends_with_main():
    """Rank 0's daemon thread serves requests; main returns after a fixed sleep while rank 1 is slower. Good: rank 1 waits for rank 0's reply/receive; rank 0's main returned while its daemon
    thread 'serve' was in recv."""
    if dist.get_rank() == 0:
        def serve():
            t = torch.zeros(1)
            for _ in range(3):
                dist.recv(t, 1)
                time.sleep(0.1)
                dist.send(t, 1)
        threading.Thread(target=serve, name="serve", daemon=True).start()
        time.sleep(0.15)  # BUG
    else:
        t = torch.zeros(1)
        for _ in range(3):
            dist.send(t, 0)
            dist.recv(t, 0)


@broken(n=2)
def warmup_dict_default_rank():
    """os.environ['LOCAL_RANK'] is used as an int key without int(): rank == '0' never true, so nobody is the source and all wait. Good: both ranks wait in recv; nobody sends."""
    rank = str(dist.get_rank())
    if rank == 0:  # BUG
        dist.send(torch.ones(1), 1)
    elif rank != 0:
        dist.recv(torch.zeros(1), 0 if dist.get_rank() else 1)


import os, threading, time, queue, random, contextlib
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from registry import broken


@broken(n=2)
def pool_wait_ignores_errors():
    """concurrent.futures.wait() returns although the task failed; then a barrier/all_reduce which the peer's task should have met. Good: rank 1's task failed
    with ZeroDivisionError at this line, nobody asked for the result."""
    g = dist.new_group([0, 1])
    pool = ThreadPoolExecutor(1)
    def job():
        if dist.get_rank() == 1:
            1 / 0  # BUG
        dist.all_reduce(torch.ones(1), group=g)
    wait([pool.submit(job)])
    dist.barrier()


@broken(n=2)
def thread_logs_error_and_ends():
    """The receiver thread catches its error, logs it and ends; main waits for a result in a queue. Good: main waits for an item of the queue; thread 'rx' caught KeyError at
    this line (in its except) and ended."""
    q = queue.Queue()
    def rx():
        try:
            t = torch.zeros(1)
            dist.recv(t, 1 - dist.get_rank())
            q.put({0: "a"}[dist.get_rank()])  # BUG
        except Exception as e:
            repr(e)
    th = threading.Thread(target=rx, name="rx", daemon=True)
    th.start()
    dist.send(torch.ones(1), 1 - dist.get_rank())
    q.get()
    dist.barrier()


@broken(n=4)
def shifted_in_row_group():
    """In the row group [2,3], rank 3 makes a leftover all_reduce (same shape) before the loop. Good: rank 3 waits in call 3 of ranks 2 and 3, rank 2 is at the barrier;
    AND call 1 was made at this line on rank 3."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    g = rows[dist.get_rank() // 2]
    if dist.get_rank() == 3:
        dist.all_reduce(torch.ones(1), group=g)  # BUG
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=g)
    dist.barrier()


@broken(n=2)
def metric_compute_under_rank0():
    """metric.compute() syncs inside but is called for logging on rank 0 only, each epoch. Good: rank 0 in all_reduce (compute line, called from the log line), rank 1 in all_reduce
    of the training step with another shape: operation/shape mismatch with call path."""
    class Metric:
        def compute(self):
            t = torch.zeros(2)
            dist.all_reduce(t)  # BUG
            return t
    m = Metric()
    for epoch in range(2):
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == 0:
            m.compute()


@broken(n=3)
def uneven_inputs_no_join():
    """DDP with one batch more on rank 0 and no join(). Good: rank 0 waits in backward's all_reduce (step 4), the others returned after 3; join()/drop_last."""
    m = DDP(nn.Linear(4, 1))
    for _ in range(3 + (dist.get_rank() == 0)):
        m(torch.ones(2, 4)).sum().backward()  # BUG


@broken(n=3)
def hook_on_one_rank():
    """A gradient hook that all-reduces is registered only where a flag is set (rank 1). Good: rank 1 alone calls all_reduce in the hook (line, within backward of line), the others barrier."""
    w = torch.ones(3, requires_grad=True)
    def hook(g):
        dist.all_reduce(g)  # BUG
        return g
    if dist.get_rank() == 1:
        w.register_hook(hook)
    (w * 2).sum().backward()
    dist.barrier()


@broken(n=3)
def exit_barrier_in_context_manager():
    """A context manager's exit has a barrier; rank 2 returns early inside a nested function without with. Good: ranks 0,1 wait in barrier (line in ctx), rank 2 returned at its line."""
    @contextlib.contextmanager
    def synced():
        yield
        dist.barrier()
    def work():
        if dist.get_rank() == 2:
            return 0  # BUG
        with synced():
            return 1
    return work()


@broken(n=2)
def queue_join_without_task_done():
    """queue.join() without task_done in the worker. Good: main waits in queue.join: 3 items unfinished; task_done missing."""
    q = queue.Queue()
    def worker():
        while True:
            x = q.get()
            if x is None:
                return  # BUG
    th = threading.Thread(target=worker, name="worker", daemon=True)
    th.start()
    for i in range(3):
        q.put(i)
    q.join()
    dist.barrier()


@broken(n=3)
def spin_lock_never_released():
    """A lock in the store by compare_set; rank 0 returns without releasing it. Good: ranks 1 and 2 poll compare_set of 'lock', which rank 0 has set and never reset."""
    s = dist.distributed_c10d._get_default_store()
    me = str(dist.get_rank() + 1)
    if dist.get_rank() == 0:
        s.set("lock", "1")
        dist.barrier()
        return  # BUG
    dist.barrier()
    while s.compare_set("lock", "0", me) != me.encode():
        time.sleep(0.01)
    s.set("lock", "0")


@broken(n=2)
def threads_make_groups_concurrently():
    """Two threads per rank each call new_group; on rank 1 in the other order. Good: new_group is a collective call of the rank: order differs between threads; make groups in main."""
    def a():
        if dist.get_rank() == 1: time.sleep(0.05)
        g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(2), group=g)  # BUG
    def b():
        if dist.get_rank() == 0: time.sleep(0.05)
        g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(3), group=g)  # BUG
    ths = [threading.Thread(target=f, name=f.__name__) for f in (a, b)]
    [t.start() for t in ths]
    [t.join() for t in ths]


@broken(n=3)
def group_timeout_slow_rank():
    """new_group with timeout 1 s; rank 2 computes (sleeps) 3 s before the all_reduce. Good: timeout of ranks 0/1 at this line after 1 s; rank 2 hasn't come yet: it sleeps at its line."""
    g = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    if dist.get_rank() == 2:
        time.sleep(3)
    dist.all_reduce(torch.ones(1), group=g)  # BUG


@broken(n=4)
def reply_only_to_last_client():
    """Server collects three requests any-source in a loop, but the reply is outside the loop: only the last gets one. Good: two clients wait in recv from rank 0, which returned after 3 recv and
    1 send."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        for _ in range(3):
            src = dist.recv(t)
        dist.send(t, src)  # BUG
    else:
        dist.send(t, 0)
        dist.recv(t, 0)


@broken(n=4)
def coordinator_counts_itself():
    """Work queue server: serves until world_size 'stop' messages came, but there are only world_size - 1 workers; workers wait for a final broadcast. Good: rank 0 waits in recv from any in its
    7th receive, 1-3 wait in broadcast for rank 0: one recv too many."""
    t = torch.zeros(1)
    if dist.get_rank() == 0:
        stops = 0
        while stops < dist.get_world_size():  # BUG
            dist.recv(t)
            stops += t.item() == 1
    else:
        dist.send(torch.zeros(1), 0)
        dist.send(torch.ones(1), 0)
    dist.broadcast(t, 0)


@broken(n=2)
def state_dict_broadcast_order():
    """Broadcasts a state dict tensor by tensor; rank 1's model has its layers built in another order (same shapes swapped types). Good: shape mismatch at broadcast k with shapes by rank."""
    m = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) if dist.get_rank() == 0 else nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    for k, v in m.state_dict().items():
        dist.broadcast(v, 0)  # BUG


@broken(n=2)
def extra_message_shifts_values():
    """Rank 0 sends a header tensor the receiver doesn't know: all later messages of same shape are shifted; rank 0's last send hangs. Good: rank 0 waits in its 4th send, rank 1 returned after 3;
    lines of both."""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([3.0]), 1)  # BUG
        for i in range(3):
            dist.send(torch.tensor([float(i)]), 1)
    else:
        for i in range(3):
            dist.recv(torch.zeros(1), 0)


@broken(n=4)
def wrong_group_handle_in_closure():
    """Groups in a loop, callback closes over the loop variable g: all ranks use the last group. Good: ranks 0 and 1 call all_reduce on a group that they aren't in ([2,3]) at this line."""
    cbs = {}
    for ranks in ([0, 1], [2, 3]):
        g = dist.new_group(ranks)
        for r in ranks:
            cbs[r] = lambda t: dist.all_reduce(t, group=g)  # BUG
    t = torch.ones(1)
    cbs[dist.get_rank()](t)
    assert t.item() == 2, t


@broken(n=2)
def allocates_huge_gather():
    """all_gather of a size read from a corrupted header: rank 1 allocates 2**60 bytes. Good: RuntimeError of the allocator on rank 1 at this line; rank 0 waits."""
    n = 4 if dist.get_rank() == 0 else 2 ** 58
    x = torch.zeros(n)  # BUG
    dist.all_gather([torch.zeros_like(x) for _ in range(2)], x)


@broken(n=2)
def busy_wait_on_python_flag():
    """Rank 1 spins (no sleep) on a list which its thread fills after an all_reduce in the world, which rank 0 skips. Good: rank 1's thread waits in all_reduce for rank 0, which returned; main spins at this line."""
    done = []
    if dist.get_rank() == 1:
        def rx():
            dist.all_reduce(torch.zeros(1))
            done.append(1)
        threading.Thread(target=rx, daemon=True, name="sync").start()
        while not done:  # BUG
            pass


import os, threading, time, queue, contextlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch, torch.distributed as dist, torch.nn as nn
from registry import broken


@broken(n=3)
def group_timeout_busy_rank():
    """As group_timeout_slow_rank, but rank 2 computes. Good: timeout on 0 and 1; rank 2 isn't there yet: it is at its line."""
    g = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    if dist.get_rank() == 2:
        end = time.time() + 3
        while time.time() < end:  # BUG
            torch.ones(10).sum()
    dist.all_reduce(torch.ones(1), group=g)


@broken(n=3)
def timeout_of_async_work_in_loop():
    """Async all_reduce with w.wait(timeout) where rank 2 first waits in a receive with the same rank's message that comes late. Good: who times out,
    that rank 2 is in recv from 0 at its line."""
    if dist.get_rank() == 2:
        dist.recv(torch.zeros(1), 0)
    w = dist.all_reduce(torch.ones(1), async_op=True)
    w.wait(timedelta(seconds=1))  # BUG
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 2)


@broken(n=2)
def daemon_thread_with_isend_unwaited():
    """Rank 0 posts an isend in the main and returns without wait, rank 1 is late: fine under gloo? no: rank 1 receives after rank 0 has gone. Here the mistake that hangs: rank 0's
    thread (not joined, daemon) waits in a lock/event before its send; main returns. Good: rank 0's daemon thread 'tx' waited for an event when main returned."""
    ev = threading.Event()
    if dist.get_rank() == 0:
        def tx():
            ev.wait()
            dist.send(torch.ones(1), 1)
        threading.Thread(target=tx, name="tx", daemon=True).start()
        return "never set"  # BUG
    dist.recv(torch.zeros(1), 0)


@broken(n=3)
def shifted_by_conditional_log_other_op():
    """Same-shape calls: rank 0 and 1 log loss every 2 steps, rank 2 every 3 (config differs). Good: first call at which the lines differ: call 3: log line on
    0,1, step line on 2."""
    every = 3 if dist.get_rank() == 2 else 2
    for step in range(1, 7):
        dist.all_reduce(torch.ones(1))
        if step % every == 0:
            dist.all_reduce(torch.ones(1))  # BUG


@broken(n=2)
def spin_on_store_get():
    """Rank 1 polls store.get('state') until it is 'ready', rank 0 sets 'Ready' (capital). Good: rank 1 polls 'state', which stays 'Ready', set by rank 0 at its line."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        s.set("state", "Ready")  # BUG
    else:
        while s.get("state") != b"ready":
            time.sleep(0.01)
    dist.barrier()


@broken(n=2)
def compare_set_expected_wrong():
    """Leader election by compare_set with the wrong expected value, busy loop on the others. Good: rank 1 polls compare_set of 'leader'."""
    s = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        s.set("leader", "0")
    dist.barrier()
    if dist.get_rank() == 1:
        while s.compare_set("leader", "x", "1") != b"1":  # BUG
            time.sleep(0.005)
    dist.barrier()


@broken(n=2)
def thread_busy_main_joined():
    """Rank 0's worker thread spins on a flag that main sets after join (order). Good: main waits for the end of 'w', which spins at this line."""
    stop = []
    def w():
        while not stop:  # BUG
            time.sleep(0.001)
    th = threading.Thread(target=w, name="w")
    th.start()
    th.join()
    stop.append(1)
    dist.barrier()


@broken(n=2)
def swallowed_in_helper():
    """The helper load() swallows every exception and returns None; caller skips the step if None. Good: rank 1 swallowed FileNotFoundError in load (line) and skipped one call."""
    def load(i):
        try:
            if i == 2 and dist.get_rank() == 1:
                open("/none/x")  # BUG
            return torch.ones(2)
        except Exception:
            return None
    for i in range(4):
        x = load(i)
        if x is None:
            continue
        dist.all_reduce(x)


@broken(n=2)
def as_completed_with_dependent_tasks():
    """Pool of 2 workers, 3 tasks: two recv block both workers, the third (send) never starts; both ranks. Good: pool full (0 of 2 free), send queued; recv at this line."""
    peer = 1 - dist.get_rank()
    with ThreadPoolExecutor(2) as ex:
        fs = [ex.submit(dist.recv, torch.zeros(1), peer), ex.submit(dist.recv, torch.zeros(1), peer)]
        fs += [ex.submit(dist.send, torch.ones(1), peer) for _ in range(2)]  # BUG
        [f.result() for f in fs]


@broken(n=4)
def stats_unpack_none_rank():
    """dist.get_rank(group) of a non-member is -1: used as list index and as gather dst: rank 3 acts as 'last' rank. Good: rank 3 isn't in the group (−1) and waits for ... line."""
    g = dist.new_group([0, 1, 2])
    gr = dist.get_rank(g)
    last = gr == -1 or gr == dist.get_world_size(g) - 1  # BUG
    t = torch.zeros(1)
    if not last:
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(t, 0)
        dist.recv(t, 1)
