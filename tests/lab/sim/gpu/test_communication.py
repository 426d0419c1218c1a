"""Hangs, communicators and devices with NCCL's semantics: reports say what is wrong on GPUs."""

import os
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.sim import Deadlock, Faults, Mismatch, Options, RankError, SimulationError, simulate
from distlab.sim.collectives.algorithms import plan, plan_uneven
from distlab.sim.gpu.communicators import Communicators
from distlab.sim.hardware.cluster import Cluster
from distlab.sim.messages.message import Communicator

Program = Callable[..., object]
GPUS = Options(semantics="nccl")
DOCUMENT = Path(__file__).parents[4] / "docs/simulator.md"


def join(*, is_eager: bool = False) -> int:
    """Join a world with one communicator for everything, or with one per pair, too."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if is_eager else None)
    return rank


def ones(size: int = 4) -> Tensor:
    return torch.ones(size, device="cuda")


def report(
    program: Program,
    num_ranks: int = 2,
    kind: type[SimulationError] = Deadlock,
    options: Options = GPUS,
) -> str:
    with pytest.raises(kind) as caught:
        simulate(program, num_ranks, cluster="dgx-h100", options=options, joined=False)
    return str(caught.value)


def wrong(program: Program, num_ranks: int = 2) -> list[str]:
    ran = simulate(program, num_ranks, cluster="dgx-h100", options=GPUS, joined=False)
    assert ran.gpu_time is not None
    return ran.gpu_time.wrong


# Messages


def sends_with_tags(sent: list[int], received: list[int], *, is_batched: bool = False) -> list[int]:
    """Send each tag as a value, and return the values that came, in the order of their tags."""
    rank, came = join(), {tag: torch.zeros(4, device="cuda") for tag in received}
    if rank == 0:
        ops = [dist.P2POp(dist.isend, tag * ones(), 1, tag=tag) for tag in sent]
    else:
        ops = [dist.P2POp(dist.irecv, came[tag], 0, tag=tag) for tag in received]
    calls = dist.batch_isend_irecv if is_batched else lambda ops: [_call(op) for op in ops]
    for work in calls(ops):
        work.wait()
    return [int(came[tag][0]) for tag in sorted(received)]


def _call(op: dist.P2POp) -> Any:
    return op.op(op.tensor, op.peer, tag=op.tag)


@pytest.mark.parametrize("is_sanitized", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_messages_received_in_another_order_than_they_were_sent(
    is_batched: bool, is_sanitized: bool
) -> None:
    program = partial(sends_with_tags, [0, 1, 2], [1, 2, 0], is_batched=is_batched)
    options = replace(GPUS, is_sanitized=is_sanitized)
    ran = simulate(program, 2, cluster="dgx-h100", options=options, joined=False)
    assert ran.results[1] == [2, 0, 1]
    assert ran.findings == []
    assert ran.gpu_time is not None
    (line,) = ran.gpu_time.wrong
    assert line.startswith("rank 1 receives with tag 1 (test_communication.py:")
    assert "what rank 0 sent with tag 0 (test_communication.py:" in line
    assert line.endswith("Post the receives in the order of the sends.")
    assert re.sub(r" \(\w+\.py:\d+ in \w+\)", "", line) in DOCUMENT.read_text()


def swaps_tags_by_gloo() -> list[float]:
    rank, group, came = join(), dist.new_group(backend="gloo"), [torch.zeros(1) for _ in range(2)]
    if rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, group, tag) for tag in range(2)]
    else:
        works = [dist.irecv(came[tag], 0, group, tag) for tag in (1, 0)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return [float(x) for x in came]


def test_tags_count_in_a_group_of_gloo() -> None:
    ran = simulate(swaps_tags_by_gloo, 2, cluster="dgx-h100", options=GPUS, joined=False)
    assert ran.results[1] == [0.0, 1.0]
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []


@pytest.mark.parametrize(
    ("sent", "received"), [([0, 1, 2], [0, 1, 2]), ([5], [0]), ([0, 1, 2], [1, 2, 3])]
)
def test_tags_that_only_differ_do_no_harm(sent: list[int], received: list[int]) -> None:
    assert wrong(partial(sends_with_tags, sent, received)) == []


def sends_alone() -> None:
    if join() == 0:
        dist.send(ones(), 1)  # returns at once
    torch.cuda.synchronize()


def receives_alone() -> None:
    rank, x = join(), ones()
    if rank == 0:
        dist.recv(x, 1)
    x.tolist()


def test_a_message_without_its_other_side_blocks_the_host_only_where_it_waits() -> None:
    text = report(sends_alone)
    assert "rank 0 waits for rank 1 to receive, but rank 1 has returned" in text
    assert "in sends_alone, waits in torch.cuda.synchronize() at line " in text
    assert "Is a recv missing on rank 1" in text
    assert "until torch's watchdog ends them after 10 minutes" in text


def test_a_call_that_outlasts_its_groups_timeout_is_wrong() -> None:
    def program() -> None:
        rank = int(os.environ["RANK"])
        dist.init_process_group("nccl", timeout=timedelta(seconds=30))
        torch.cuda.set_device(rank)
        time.sleep(45 * rank)
        dist.all_reduce(ones())
        dist.all_reduce(ones())

    (line,) = wrong(program)
    assert "all_reduce (call 1 of ranks 0 and 1) ends 45 s after its launch, for which" in line
    assert line.endswith(
        "as its group has a timeout of 30 s: give the group a longer timeout=, or let the ranks "
        "wait for less time"
    )
    shown = re.sub(r"^.*?: |all_reduce", "", line, count=1).replace("all_reduce", "barrier")
    assert shown in DOCUMENT.read_text()


@pytest.mark.parametrize(
    ("of_world", "of_group", "words"),
    [
        (timedelta(minutes=30), None, "10 minutes"),
        (None, timedelta(seconds=90), "90 s"),
        (None, timedelta(minutes=30), "30 minutes"),
        (timedelta(minutes=1), "world", "1 minute"),
    ],
)
@pytest.mark.parametrize("kind", [Deadlock, Mismatch])
def test_the_watchdog_waits_for_the_groups_timeout(
    of_world: timedelta | None, of_group: Any, words: str, kind: type[SimulationError]
) -> None:
    def program() -> None:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", timeout=of_world)
        other = None if of_group == "world" else dist.new_group([0, 1], of_group)
        if kind is Mismatch or rank == 0:
            dist.all_reduce(ones(4 + rank), group=other)
        torch.cuda.synchronize()

    assert f"after {words}. " in report(program, kind=kind)


def test_values_that_never_come_are_waited_for_where_the_program_needs_them() -> None:
    text = report(receives_alone)
    assert "rank 0 waits for rank 1 to send" in text
    assert ", waits for values at line " in text


def exchange(*, is_eager: bool = False, batched: tuple[int, ...] = ()) -> float:
    rank = join(is_eager=is_eager)
    x, y = ones(), torch.zeros(4, device="cuda")
    if rank in batched:
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        works = dist.batch_isend_irecv(ops)
    else:
        works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    for work in works:
        work.wait()
    return float(y.sum())


@pytest.mark.parametrize("is_eager", [False, True])
def test_messages_that_wait_for_their_turn_are_named(is_eager: bool) -> None:
    text = report(lambda: exchange(is_eager=is_eager))
    assert "Rank 0's irecv from rank 1 waits behind its isend to rank 1" in text
    assert "Give both to batch_isend_irecv" in text
    assert "also posted, and not started:\n  rank 0  recv from rank 1" in text
    assert wrong(lambda: exchange(is_eager=is_eager, batched=(0, 1))) == []


def test_a_batch_never_meets_single_messages() -> None:
    text = report(lambda: exchange(batched=(0,)))
    assert "sends to rank 0 without a batch, but rank 0 receives in one" in text
    assert "Call batch_isend_irecv on both ranks" in text
    assert "same group" not in text


def ring() -> None:
    rank = join(is_eager=True)
    x, y = ones(), ones()
    works = [dist.isend(x, (rank + 1) % 3), dist.irecv(y, (rank - 1) % 3)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()


def collective_first() -> None:
    rank = join(is_eager=True)
    x, y = ones(), ones()
    if rank == 0:
        dist.all_reduce(x, async_op=True)
        dist.recv(y, 1)
    else:
        dist.send(y, 0)
        dist.all_reduce(x)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("program", "num_ranks", "words"),
    [
        (ring, 3, "Rank 0's irecv from rank 2 waits behind its isend to rank 1"),
        (collective_first, 2, "waits behind its all_reduce (call 1 of ranks 0 and 1)"),
    ],
)
def test_what_shares_a_communicator_runs_in_the_order_of_the_calls(
    program: Program, num_ranks: int, words: str
) -> None:
    text = report(program, num_ranks)
    assert words in text
    assert "what is on one communicator or one stream" in text


# Groups


def two_groups(*, waits_between: bool = False) -> None:
    rank = join()
    groups, works = [dist.new_group([0, 1]) for _ in range(2)], []
    for group in groups if rank == 0 else groups[::-1]:
        x = ones()
        works.append(dist.all_reduce(x, group=group, async_op=True))
        if waits_between:
            works[-1].wait()
            x.sum().item()
    for work in works:
        work.wait()


def test_two_groups_in_opposite_orders_hang() -> None:
    (line,) = wrong(two_groups)
    assert line.startswith("rank 0 calls all_reduce (call 1 of ranks 0 and 1) on their 1st group")
    assert "before all_reduce (call 1 of ranks 0 and 1) on their 2nd group" in line
    text = report(lambda: two_groups(waits_between=True))
    assert "deadlock (order mismatch)" in text
    assert "in the same order" in text


def begins_with_a_batch(*, is_warm: bool = False) -> None:
    rank = join()
    x, y = ones(), ones()
    if is_warm:
        dist.all_reduce(x)
    if rank < 2:
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def test_the_first_call_of_a_group_must_not_be_a_batch_of_some_ranks() -> None:
    (line,) = wrong(begins_with_a_batch, 3)
    assert "first call is a batch of ranks 0 and 1, without rank 2" in line
    assert wrong(lambda: begins_with_a_batch(is_warm=True), 3) == []


def differing_shapes() -> None:
    dist.all_reduce(ones(4 + join()))


def skipped_call() -> None:
    if join() == 0:
        dist.all_reduce(ones())
    dist.broadcast(ones(), 0)


@pytest.mark.parametrize("program", [differing_shapes, skipped_call])
def test_a_mismatch_says_that_nccl_compares_nothing(program: Program) -> None:
    text = report(program, kind=Mismatch)
    assert text.count("NCCL compares nothing") == 1
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in text


# Lists of tensors of different sizes


def gathers_uneven(scale: int = 1) -> list[float]:
    rank = join()
    parts = [torch.zeros(scale * size, device="cuda") for size in (1, 3)]
    dist.all_gather(parts, torch.full_like(parts[rank], rank + 1.0))
    return torch.cat(parts)[-3 * scale - 1 :].tolist()[:4]


def scatters_uneven(scale: int = 1) -> list[float]:
    rank = join()
    parts = [torch.full((scale * size,), size + rank, device="cuda") for size in (1, 3)]
    output = torch.zeros(len(parts[rank]), device="cuda", dtype=torch.int64)
    dist.reduce_scatter(output, parts)
    return output[:4].tolist()


@pytest.mark.parametrize(
    ("program", "results", "sent"),
    [
        (gathers_uneven, [[1.0, 2.0, 2.0, 2.0]] * 2, (1 << 22, 3 << 22)),
        (scatters_uneven, [[3], [7, 7, 7]], (3 << 23, 1 << 23)),
    ],
)
def test_uneven_lists_travel_as_one_broadcast_or_reduce_per_rank(
    program: Callable[..., Any], results: list[Any], sent: tuple[int, int]
) -> None:
    small = simulate(program, 2, cluster="dgx-h100", options=GPUS, joined=False)
    assert small.results == results
    large = simulate(program, 2, 2**20, cluster="dgx-h100", options=GPUS, joined=False)
    assert large.trace.bytes_sent == [*sent]


def test_the_broadcasts_of_an_uneven_list_run_at_the_same_time() -> None:
    cluster, small, large = Cluster.preset("dgx-h100"), 1 << 22, 3 << 22
    (phase,) = plan_uneven("all_gather", "auto", [0, 1], [small, large], cluster)
    (largest,) = plan("broadcast", "auto", [0, 1], large, cluster, root=1)
    assert {*phase.transfers} == {(0, 1, small), (1, 0, large)}
    assert phase.latency_s == largest.latency_s
    assert max(phase.bytes_on_links) == max(largest.bytes_on_links)


def in_one_tensor(device: str) -> list[list[float]]:
    """All-gather and reduce-scatter 3 numbers as a row and as a column of another tensor."""
    join()
    group = dist.new_group(backend="gloo" if device == "cpu" else "nccl")
    part, rows, column = torch.arange(3.0), torch.zeros(2, 3), torch.arange(6.0).view(6, 1)
    part, rows, column = (x.to(device) for x in (part, rows, column))
    dist.all_gather_single(rows, part, group=group)
    dist.reduce_scatter_single(part, column, group=group)
    number, numbers = part.sum(), part[:2].clone()
    dist.all_gather_single(numbers, number, group=group)
    return [rows.flatten().tolist(), part.tolist(), numbers.tolist()]


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13")
def test_nccl_compares_numbers_of_elements_where_gloo_compares_shapes() -> None:
    program = partial(in_one_tensor, "cuda")
    (first, second) = simulate(program, 2, cluster="dgx-h100", options=GPUS, joined=False).results
    assert first == [[0.0, 1.0, 2.0] * 2, [0.0, 2.0, 4.0], [6.0, 24.0]]
    assert second == [[0.0, 1.0, 2.0] * 2, [6.0, 8.0, 10.0], [6.0, 24.0]]
    text = report(partial(in_one_tensor, "cpu"), kind=RankError)
    assert "gloo needs one of shape (6,), got (2, 3): pass .view(6) of it" in text


def gathers_other_sizes() -> None:
    sizes = [(1, 3), (1, 2)][join()]
    parts = [ones(size) for size in sizes]
    dist.all_gather(parts, ones(sizes[dist.get_rank()]))


def gathers_what_it_has() -> None:
    mine = ones(2 + join())
    dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)


def gathers_into_a_wrong_place() -> None:
    join()
    dist.all_gather([ones(1), ones(3)], ones(2))


def gathers_uneven_by_gloo() -> None:
    rank = join()
    parts = [torch.ones(1), torch.ones(3)]
    dist.all_gather(parts, parts[rank], group=dist.new_group(backend="gloo"))


def test_lists_that_do_not_fit_are_refused() -> None:
    text = report(gathers_other_sizes, kind=Mismatch)
    assert "all_gather with size [1, 3] on rank 0, but with size [1, 2] on rank 1" in text
    assert "pad to the largest" not in text
    assert "On NCCL, a list of tensors of the right sizes" in report(
        gathers_what_it_has, kind=Mismatch
    )
    text = report(gathers_into_a_wrong_place, kind=RankError)
    assert "the one at index 0 has the shape of the input, (2,); got [(1,), (3,)]" in text
    text = report(gathers_uneven_by_gloo, kind=RankError)
    assert "needs a list of 2 tensors of that shape, got [(1,), (3,)]" in text


# Devices and ranks


def one_gpu_for_all() -> None:
    dist.init_process_group("nccl")
    dist.all_reduce(ones())


def test_two_ranks_on_one_gpu_are_refused() -> None:
    text = report(one_gpu_for_all, kind=RankError)
    assert "Duplicate GPU detected : ranks 0 and 1 both use cuda:0 of node 0" in text
    assert "rank 0  all_reduce" in text
    assert "waits at the end of its program" in text


def gpus_of_calls(*, bound: int = -1, ids: int = -1) -> list[str]:
    """Return the GPUs on which rank 1 runs a barrier, a sum of a tensor on cuda:1, and a barrier.

    Args:
        bound: Number of the GPU that the group is bound to, less the rank's number; -1 for none.
        ids: The same for ``device_ids`` of the first barrier.
    """

    def program() -> None:
        local = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", bound + local) if bound >= 0 else None
        dist.init_process_group("nccl", device_id=device)
        dist.barrier(device_ids=[ids + local] if ids >= 0 else None)
        dist.all_reduce(torch.ones(4, device=f"cuda:{local}"))
        dist.barrier()

    tracked = Options(semantics="nccl", has_events=True)
    ran = simulate(program, 2, cluster="dgx-h100", options=tracked, joined=False)
    assert ran.gpu_time is not None
    tracks = [track for track in ran.gpu_time.tracks if track.event.kind == "collective"]
    return [track.track[:6] for track in tracks if track.event.rank == 1]


@pytest.mark.filterwarnings("ignore:barrier()")  # torch's advice on devices, on rank 0
def test_a_barrier_runs_on_the_gpu_that_torch_chooses() -> None:
    assert gpus_of_calls(ids=4) == ["cuda:5", "cuda:1", "cuda:1"]
    assert gpus_of_calls(bound=2) == ["cuda:3", "cuda:1", "cuda:3"]
    assert gpus_of_calls(bound=2, ids=4) == ["cuda:5", "cuda:1", "cuda:3"]
    assert gpus_of_calls() == ["cuda:1"] * 3  # no call before it: that of the rank's number


def advice_in_barriers(*, is_eager: bool) -> list[str]:
    """Return torch's warnings in a barrier of all ranks, one of a new group and one with a GPU."""
    join(is_eager=is_eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.barrier()
        dist.barrier(dist.new_group([0, 1]), async_op=True).wait()
        dist.barrier(device_ids=[torch.cuda.current_device()])
    return [str(warning.message) for warning in caught]


def test_torch_advises_a_device_id_in_a_barrier_only_where_there_is_none() -> None:
    def told(*, is_eager: bool) -> list[list[str]]:
        program = partial(advice_in_barriers, is_eager=is_eager)
        return simulate(program, 2, cluster="dgx-h100", options=GPUS, joined=False).results

    assert told(is_eager=True) == [[], []]
    ((first, second), others) = told(is_eager=False)
    assert first == second
    assert first.startswith("barrier(): using the device under current context")
    assert others == []


def swaps_gpus() -> None:
    rank = join()
    dist.barrier(device_ids=[1 - rank])
    dist.all_reduce(ones())


def test_ranks_that_all_change_their_gpus_get_a_second_communicator() -> None:
    assert wrong(swaps_gpus, 2) == []


def changes_its_gpu_alone(rank_that_changes: int) -> None:
    rank = join()
    dist.barrier(device_ids=[rank])
    dist.barrier(device_ids=[3 if rank == rank_that_changes else rank])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_changes_its_gpu_alone_would_wait_for_ever(rank: int) -> None:
    text = report(partial(changes_its_gpu_alone, rank), 3, kind=RankError)
    assert f"rank {rank} is on cuda:3 in this call, and was on cuda:{rank} in earlier ones" in text


def returns_to_a_gpu() -> None:
    rank = join()
    for numbers in ((0, 1), (1, 0), (0, 0)):
        dist.barrier(device_ids=[numbers[rank]])


def test_two_ranks_on_one_gpu_are_refused_in_a_later_call_too() -> None:
    text = report(returns_to_a_gpu, kind=RankError)
    assert "Duplicate GPU detected : ranks 0 and 1 both use cuda:0 of node 0" in text


def test_the_gpus_of_a_collective_are_forgotten_once_all_ranks_have_come() -> None:
    communicators, key = Communicators(), Communicator("a group")
    for number, rank in product(range(3), range(2)):
        communicators.check_place(key, number, rank, (0, 1), (0, rank), None)
    assert communicators._places == {}


def barrier_on_a_missing_gpu() -> None:
    join()
    dist.barrier(device_ids=[8])


def test_a_barrier_on_a_gpu_that_the_node_lacks_is_refused() -> None:
    text = report(barrier_on_a_missing_gpu, kind=RankError)
    assert "invalid device ordinal (rank 0 asks for cuda:8" in text


def two_per_gpu() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % 2)
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:  # so that the wrong rank may come first
        time.sleep(1e-3)
    dist.all_reduce(ones())


def test_a_gpu_that_a_rank_chose_wrongly_is_named_with_the_line() -> None:
    text = report(two_per_gpu, 3, kind=RankError)
    assert "ranks 0 and 2 both use cuda:0 of node 0. Rank 2 chose it by torch.cuda." in text
    assert re.search(
        r"cuda\.set_device\(0\) at test_\S+ in two_per_gpu, but its LOCAL_RANK is 2: pass that",
        text,
    )


def adds_to(make: Callable[[], Tensor]) -> Callable[[], object]:
    def program() -> None:
        if join() == 1:
            make() + torch.ones(4, device="cuda:1")

    return program


def written_later() -> Tensor:
    x = torch.empty(4, device="cuda:0")
    return x.fill_(1)


def copied_to_the_host() -> Tensor:
    return ones().to("cpu", non_blocking=True)


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (
            lambda: torch.ones(4).to("cuda:0"),
            r"The one on cuda:0 was made at test_communication.py:\d+ in <lambda>; rank 1's GPU is "
            r"cuda:1: use cuda:LOCAL_RANK there\.",
        ),
        (
            written_later,
            r"The one on cuda:0 was written at test_\S+ in written_later; rank 1's GPU",
        ),
        (copied_to_the_host, r"The one on cpu was made at test_\S+ in copied_to_the_host\."),
    ],
)
def test_the_error_for_two_devices_says_where_the_tensor_comes_from(
    make: Callable[[], Tensor], note: str
) -> None:
    text = report(adds_to(make), kind=RankError)
    assert "Expected all tensors to be on the same device" in text
    assert re.search(rf"\(in add\)\n\n{note}", text)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cos = torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cos[: len(x)]


def test_an_attribute_that_stays_on_the_cpu_is_named() -> None:
    text = report(lambda: Turning().to("cuda")(ones()), kind=RankError)
    assert "\n\nThe one on cpu is self.cos of Turning, a plain attribute: .to() moves only" in text


def own_gpu_by_environment() -> tuple[int, str, float]:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    x = torch.ones(4, device="cuda:0")
    dist.init_process_group("nccl")
    dist.all_reduce(x)
    return torch.cuda.device_count(), str(x.device), float(x.sum())


def too_late() -> None:
    x = ones()
    own_gpu_by_environment()
    x.add_(1)


def test_cuda_visible_devices_gives_each_rank_a_gpu_unless_it_is_set_too_late() -> None:
    ran = simulate(own_gpu_by_environment, 2, cluster="dgx-h100", options=GPUS, joined=False)
    assert ran.results == [(1, "cuda:0", 8.0)] * 2
    assert "Duplicate GPU detected" in report(too_late, kind=RankError)


def wrong_number() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    torch.ones(4, device=f"cuda:{os.environ['LOCAL_RANK']}")


def test_a_gpu_that_the_rank_does_not_see_is_refused() -> None:
    text = report(wrong_number, kind=RankError)
    assert "invalid device ordinal (rank 1 asks for cuda:1, and it sees 1 GPU, cuda:0)" in text


def host_tensor() -> None:
    join()
    dist.all_reduce(torch.ones(4))


def test_a_tensor_of_the_host_is_refused() -> None:
    text = report(host_tensor, kind=RankError)
    assert "No backend type associated with device type cpu" in text
    assert "gloo" in text


def raises_on_one() -> None:
    rank, x = join(), ones()
    dist.all_reduce(x)
    if rank == 1:
        x.tolist()
        raise ValueError("no data")
    dist.all_reduce(x)
    x.tolist()


def test_an_exception_is_the_cause_and_not_the_wait_for_it() -> None:
    text = report(raises_on_one, kind=RankError)
    assert text.startswith("rank 1 of 2 raised ValueError: no data")


def reduces_often() -> None:
    x = join() * ones()
    for _ in range(100):
        dist.all_reduce(x)
        x.tolist()


@pytest.mark.parametrize("killed_s", [30e-6, 1e-3])
def test_a_killed_rank_is_to_blame_for_the_hang_of_the_others(killed_s: float) -> None:
    options = Options(semantics="nccl", faults=Faults(kill_ranks={1: killed_s}))
    text = report(reduces_often, 3, options=options)
    assert "for rank 1, but rank 1 was killed by a fault" in text


# The sanitizer


def trains_two_stages() -> None:
    rank = join()
    torch.manual_seed(0)
    stage = torch.nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(2):
        if rank == 0:
            output = stage(ones().view(1, 4))
            gradient = torch.empty_like(output)
            dist.send(output.detach(), 1)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            received = torch.empty(1, 4, device="cuda")
            dist.recv(received, 0)
            stage(received.requires_grad_()).square().sum().backward()
            dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()


def test_the_sanitizer_sees_messages_of_gpus_and_takes_stages_for_no_replicas() -> None:
    options = Options(semantics="nccl", is_sanitized=True)
    ran = simulate(trains_two_stages, 2, cluster="dgx-h100", options=options, joined=False)
    assert ran.findings == []


# Torch's own code


def frees_the_input_of_a_collective() -> list[float]:
    rank, outputs = join(), torch.empty(2, 4, device="cuda")
    inputs = torch.full((4,), rank + 1.0, device="cuda")
    dist.all_gather([*outputs], inputs, async_op=True).wait()
    inputs.untyped_storage().resize_(0)
    return outputs.flatten().tolist()


def sums_in_a_block() -> list[float]:
    join()
    parts, device = [ones(1), ones(2)], torch.device("cuda", torch.cuda.current_device())
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        for part in parts:
            dist.all_reduce(part)
    block.wait()
    return torch.cat(parts).tolist()


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (frees_the_input_of_a_collective, [1.0] * 4 + [2.0] * 4),
        (sums_in_a_block, [2.0] * 3),
    ],
)
def test_bytes_arrive_before_they_are_needed(program: Program, result: list[float]) -> None:
    ran = simulate(program, 2, cluster="dgx-h100", options=GPUS, joined=False)
    assert ran.results == [result] * 2
    assert ran.gpu_time is not None
    assert ran.gpu_time.wrong == []
    assert ran.trace.unwaited == []


def wraps_a_model_on_the_cpu() -> None:
    join()
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_torchs_own_calls_with_tensors_of_the_host_are_refused() -> None:
    assert "No backend type associated with device type cpu" in report(
        wraps_a_model_on_the_cpu, kind=RankError
    )


def uses_on_another_stream_than_the_one_that_waits() -> None:
    join()
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    x.add_(1)


def test_a_stream_that_waits_for_communication_is_named() -> None:
    (line,) = wrong(uses_on_another_stream_than_the_one_that_waits)
    assert "only stream 1 waits for it, so let the default stream wait for that" in line
