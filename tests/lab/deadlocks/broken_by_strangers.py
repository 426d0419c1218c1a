"""Broken programs by people who had not seen the simulator.

Of their 525 programs, those kept here either led to a change in the simulator, or get a report
that says something no other report in the catalogue says.
"""

import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import torch
import torch.distributed as dist
from catalogue import (
    CYCLE,
    ENDED,
    KEY,
    MISSING,
    OPERATION,
    ORDER,
    THREAD,
    data,
    deadlock,
    empty,
    me,
    mismatch,
    rank_error,
    size,
    value,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

# Caught exceptions


@deadlock(
    4,
    ENDED,
    (1,),
    "returned after 2 calls",
    "The except of line",
    "can hide an error: did rank 1 come through it, and so leave out a call?",
)
def skips_a_bad_batch() -> None:
    """Rank 1 skips a batch that it cannot read, and therefore makes one call fewer."""
    for step in range(3):
        try:
            x = value(int("x") if (step, me()) == (1, 1) else 1)
        except ValueError:
            continue
        dist.all_reduce(x)


@deadlock(
    4,
    ENDED,
    (2,),
    "rank 2 returned without communicating broken_by_strangers.py:",
    "in the except of line",
)
def swallows_its_error_and_returns() -> None:
    """Rank 2 fails before the all_reduce and swallows its error."""
    try:
        if me() == 2:
            raise ValueError("bad sample")
        dist.all_reduce(data())
    except Exception:
        pass


@deadlock(
    2,
    ENDED,
    (0,),
    "The suppress of line",
    "can hide an error: did rank 0 come through it, and so leave out a call?",
)
def suppresses_its_error() -> None:
    """contextlib.suppress swallows an error; afterwards, no stack frame shows that it did."""
    with suppress(KeyError):
        losses = {1: 1.0}
        dist.all_reduce(value(losses[me()]))


@deadlock(
    4,
    MISSING,
    (3,),
    "On rank 3, an except deals with KeyError: 'missing', broken_by_strangers.py:",
    "Or else: Rank 3 cannot go on until rank 0 receives",
    if_buffered=ENDED,
)
def reports_its_error_to_rank_0() -> None:
    """Rank 3 sends its error to rank 0, which waits for rank 3 in an all_reduce."""
    try:
        if me() == 3:
            raise KeyError("missing")
        dist.all_reduce(data())
    except KeyError:
        dist.send(data(), 0)


@mismatch(
    4,
    OPERATION,
    (1,),
    "On rank 1, all_gather_object raised TypeError: cannot pickle 'generator' object.",
    "The exception was caught, so the other ranks do not know.",
    "all_gather_object sends sizes first, then the objects",
)
def gathers_what_cannot_be_pickled() -> None:
    """Rank 1 passes an object that cannot be sent, catches the error, and reaches the barrier."""
    with suppress(TypeError):
        batches: object = (batch for batch in range(3)) if me() == 1 else 1
        dist.all_gather_object([None] * size(), batches)
    dist.barrier()


# Ranks and groups


@rank_error(4, "os._exit", (1,), "rank 1 of 4 ended by os._exit(1), broken_by_strangers.py:")
def ends_its_process() -> None:
    """Rank 1 calls os._exit; the process that simulates all ranks survives."""
    if me() == 1:
        os._exit(1)
    dist.barrier()


@rank_error(4, "SystemExit", (1,), "rank 1 of 4 raised SystemExit: 0, broken_by_strangers.py:")
def exits_early() -> None:
    """Rank 1 exits before the others."""
    if me() == 1:
        raise SystemExit(0)
    dist.barrier()


@deadlock(4, ENDED, (3,), "rank 3 destroyed its process group without communicating")
def destroys_its_group_early() -> None:
    """Rank 3 destroys its process group while the others reduce."""
    if me() == 3:
        dist.destroy_process_group()
    else:
        dist.all_reduce(data())


@rank_error(
    4,
    "AssertionError",
    (),
    "called all_gather on a group that it is not in, broken_by_strangers.py:",
    "torch has left out that call.",
)
def gathers_in_a_group_of_others() -> None:
    """All four ranks call collectives on a group of two; torch skips the calls of non-members."""
    pair = dist.new_group([0, 1])
    total = value(1)
    dist.all_gather([empty(), empty()], total, group=pair)
    dist.all_reduce(total, group=pair)
    assert total.item() == 2


@deadlock(
    4,
    ENDED,
    (2,),
    "Rank 2 returned without waiting for its all_reduce (call 1 of ranks 0-3), (4,) float32",
)
def returns_inside_the_loop() -> None:
    """On rank 2, the return is indented one level too far."""
    works = []
    for _ in range(3):
        works.append(dist.all_reduce(data(), async_op=True))
        if me() == 2:
            return
    for work in works:
        work.wait()


@deadlock(
    4,
    ENDED,
    (0, 1),
    "Call 2 of the group was made by ranks 0 and 1 at broken_by_strangers.py:",
    "and by ranks 2 and 3 at broken_by_strangers.py:",
    "do some ranks make a call more there, or one less? If not: why did ranks 0 and 1 return",
)
def logs_large_losses_only() -> None:
    """Two ranks' extra call matches the others' next step, so the error shows only at the end."""
    for step in range(3):
        dist.all_reduce(data())
        if step == 0 and me() > 1:
            dist.all_reduce(data())


@deadlock(
    4,
    CYCLE,
    (0, 1, 2, 3),
    "Does rank 0, which waits for any rank, receive once too often before it sends?",
)
def leader_counts_itself() -> None:
    """The leader waits for one vote per rank, itself included."""
    if me() == 0:
        for _ in range(size()):
            dist.recv(empty())
        for rank in range(1, size()):
            dist.send(empty(), rank)
    else:
        dist.send(empty(), 0)
        dist.recv(empty(), 0)


@deadlock(
    4,
    ORDER,
    (0, 2),
    "rank 0 waits in new_group of ranks 0 and 2 for rank 2",
    "torch makes this call by itself in init_device_mesh",
)
def mesh_of_one_rank() -> None:
    """Only rank 0 creates a mesh."""
    if me() == 0:
        init_device_mesh("cpu", (2, 2))
    dist.barrier()


@deadlock(
    4,
    ENDED,
    (0, 1),
    "rank 3 calls all_reduce on ranks 0-3, and ranks 0 and 1 call it on ranks 0 and 1 (axis tp): "
    "is group= missing, or None, on rank 3?",
)
def axis_forgotten_on_one_rank() -> None:
    """Rank 3 reduces over the world, but its partner reduces over the mesh axis that they share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(data(), group=None if me() == 3 else mesh.get_group("tp"))


# Keys


@deadlock(
    2,
    KEY,
    (0, 1),
    "wait for the key 'n', which stays 2: rank",
    "store.add for 'n' broken_by_strangers.py:",
    "Which rank should change it, and does that rank wait for something else first?",
)
def counts_to_three() -> None:
    """Two ranks each add one to a counter, then wait for it to reach three."""
    store = _get_default_store()
    store.add("n", 1)
    while store.add("n", 0) < 3:
        time.sleep(0.01)


@deadlock(
    4,
    KEY,
    (0, 1, 2),
    "ranks 0-2 wait for the key 'clock-3-2', which no rank has set",
    "There is a key 'clock-3-1', which rank 3 has set at",
    "does a rank set one key less?",
)
def one_clock_stops_early() -> None:
    """In each step, every rank waits for all ranks' clocks, but rank 3 takes one step fewer."""
    store = _get_default_store()
    for step in range(2 if me() == 3 else 3):
        store.set(f"clock-{me()}-{step}", "1")
        store.wait([f"clock-{rank}-{step}" for rank in range(size())])


@deadlock(
    2,
    KEY,
    (1,),
    "There is a key 'job/addr' ('x'): is it meant, or does the rank that should set 'addr' not "
    "come to it?",
)
def key_with_a_prefix() -> None:
    """Rank 0 writes through a PrefixStore, and rank 1 reads the underlying store."""
    store = _get_default_store()
    if me() == 0:
        dist.PrefixStore("job", store).set("addr", "x")
    else:
        store.get("addr")


# Threads


@deadlock(
    2,
    ENDED,
    (0,),
    "On rank 0, thread 'sender' ended with KeyError: 'grad', broken_by_strangers.py:",
    "Or else: Is a send missing on rank 0",
)
def sender_dies() -> None:
    """The thread that should send dies, and Python only prints its error."""

    def send() -> None:
        gradients: dict[str, torch.Tensor] = {}
        dist.send(gradients["grad"], 1)

    if me() == 0:
        thread = threading.Thread(target=send, name="sender")
        thread.start()
        thread.join()
    else:
        dist.recv(empty(), 0)


@deadlock(
    2,
    ORDER,
    (0, 1),
    "On rank 1, what ran in thread 'ThreadPoolExecutor-0_0' ended with ZeroDivisionError",
    "and nobody has asked for it.",
)
def task_fails_unseen() -> None:
    """wait() returns although the task has failed, and the rank reaches the barrier."""
    both = dist.new_group([0, 1])

    def save() -> None:
        dist.all_reduce(value(1 // (1 - me())), group=both)

    with ThreadPoolExecutor(1) as pool:
        wait([pool.submit(save)])
        dist.barrier()


@deadlock(
    2,
    ENDED,
    (0,),
    "Rank 0 ended, and daemon thread 'serve' with it, which was at broken_by_strangers.py:",
)
def daemon_ends_with_its_rank() -> None:
    """Rank 0 returns while its daemon thread is still serving rank 1."""

    def serve() -> None:
        for _ in range(3):
            dist.recv(empty(), 1)
            time.sleep(0.1)
            dist.send(empty(), 1)

    if me() == 0:
        threading.Thread(target=serve, name="serve", daemon=True).start()
        time.sleep(0.15)
    else:
        for _ in range(3):
            dist.send(empty(), 0)
            dist.recv(empty(), 0)


@deadlock(
    2,
    ENDED,
    (0,),
    "daemon thread 'later' with it, which had not begun (started at broken_by_strangers.py:",
)
def daemon_ends_before_it_begins() -> None:
    """Rank 0 starts a daemon thread that should send, and returns immediately."""

    def send() -> None:
        time.sleep(0.5)
        dist.send(empty(), 1)

    if me() == 0:
        threading.Thread(target=send, name="later", daemon=True).start()
    else:
        dist.recv(empty(), 0)


@deadlock(
    2,
    MISSING,
    (0,),
    "on rank 1 thread 'push' waits for a lock of its own, held by the main thread",
    "On rank 1 the main thread holds a lock while it waits in all_reduce. If a rank waits for what "
    "thread 'push' does with that lock, release it before communicating.",
)
def lock_held_in_a_collective() -> None:
    """Rank 1 reduces while holding a lock that its sender needs; rank 0 waits for the sender."""
    both, lock = dist.new_group([0, 1]), threading.Lock()

    def push() -> None:
        with lock:
            dist.send(empty(), 0, group=both)

    if me() == 0:
        dist.recv(empty(), 1, group=both)
        dist.all_reduce(data())
        return
    thread = threading.Thread(target=push, name="push")
    with lock:
        thread.start()
        dist.all_reduce(data())
    thread.join()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "thread 'consumer' waits for a condition of its own",
    "Is a notify() missing, or was it too early?",
)
def condition_without_notify() -> None:
    """A producer adds an item but does not notify the thread that waits for one."""
    condition = threading.Condition()
    items: list[int] = []

    def consume() -> None:
        with condition:
            while not items:
                condition.wait()

    thread = threading.Thread(target=consume, name="consumer")
    thread.start()
    time.sleep(0.01)
    with condition:
        items.append(1)
    thread.join()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "thread 'a' waits for the end of thread 'b', and thread 'b' waits for the end of thread 'a'",
    "Threads that wait for each other never go on: one of them must not wait.",
)
def threads_join_each_other() -> None:
    """Two threads join each other."""
    threads: dict[str, threading.Thread] = {}
    started = threading.Event()

    def join(other: str) -> None:
        started.wait()
        threads[other].join()

    for name, other in ("ab", "ba"):
        threads[name] = threading.Thread(target=join, args=(other,), name=name)
        threads[name].start()
    started.set()
    threads["a"].join()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "no thread of its pool is free (0 of 1)",
    "A task must not wait for another one of the same pool: call that one itself",
)
def task_waits_for_a_task_of_its_pool() -> None:
    """A save runs in a one-worker pool, submits its upload to the same pool, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: pool.submit(int).result()).result()
    dist.barrier()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "the end of the work on a queue of their own (0 items still in it, 3 without task_done())",
    "Is a task_done() missing after one of the get()?",
)
def queue_whose_tasks_are_never_done() -> None:
    """A worker takes items from a queue and never calls task_done()."""
    items = queue.Queue[int]()

    def work() -> None:
        while True:
            items.get()

    threading.Thread(target=work, name="worker", daemon=True).start()
    for item in range(3):
        items.put(item)
    items.join()
    dist.barrier()


@deadlock(
    2,
    THREAD,
    (0, 1),
    "On ranks 0 and 1, an except deals with Empty, broken_by_strangers.py:",
    "change the file, flag or answer that is looked for between the sleeps: wait for that process",
)
def looks_for_an_item_that_never_comes() -> None:
    """A rank polls a queue that no thread fills."""
    items = queue.Queue[int]()
    while True:
        try:
            items.get_nowait()
            break
        except queue.Empty:
            time.sleep(0.01)
    dist.barrier()
