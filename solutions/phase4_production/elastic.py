"""Elastic training: workers come and go, and the result is that of an undisturbed run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from phase4_production.given import EXIT_STOPPED, Group, Job, Loaded


def run_elastic(
    job: Job,
    folder: Path,
    *,
    num_samples: int,
    global_batch: int,
    num_epochs: int,
    save_every: int,
    micro_batch: int,
    save: Callable[[dict[str, Any], Path, int], object],
    load: Callable[[Path], Loaded | None],
    should_stop: Callable[[], bool] = lambda: False,
    seed: int = 0,
    group: Group = None,
) -> int:
    """Train ``job`` to the end, from wherever an earlier call with any number of ranks has come to.

    A launcher such as torchrun ends all workers when one dies or another joins, and starts them
    anew with other ranks. Nine samples in global batches of four, a checkpoint in every step; rank
    1 of two dies in step 2, and three go on:
        step   epoch   samples       2 ranks      3 ranks
        1      0       4 5 2 6       4 5 | 2 6                    saved
        2      0       3 8 7 0       3 8 | ✗      3 8 | 7 | 0     done again, saved
        3      0       1                          1   |   |       saved
        4      1       1 3 6 7                    1 3 | 6 | 7     saved

    Whatever happens, each sample is trained on once per epoch in those steps that count, which are
    all but those that were lost with what came after the last checkpoint. Each step has the samples
    that it would have on one rank without any failure, and the parameters become the same, but for
    rounding.

    Args:
        job: the training. It may begin with other parameters on each rank: all ranks continue from
            the newest checkpoint that rank 0 finds, or from the state of rank 0's job if there is
            none. Its gradients need not be cleared.
        folder: folder of the checkpoints.
        num_samples: samples of an epoch, at least 1. They are 0 to num_samples − 1, in an order of
            their own in each epoch, which ``seed`` and the epoch alone decide.
        global_batch: how many samples there are in a step, with any number of ranks; at least 1.
            The last step of an epoch has the rest. The ranks' shares differ by at most one sample,
            and may be empty.
        num_epochs: epochs of the whole run.
        save_every: a checkpoint is saved after every step whose number is a multiple of this, and
            after the last. At least 1.
        micro_batch: how many samples the job gets at once, at most; at least 1. A larger share is
            cut into as few of these as possible, whose gradients add up.
        save: makes a state durable, as the checkpoint of a step: ``save_checkpoint``, for example,
            which takes tensors, numbers and dicts. Rank 0 alone calls it, and no rank begins
            another step, returns or exits before it has returned.
        load: returns the newest checkpoint in a folder, or None: ``load_checkpoint``, for example.
            Rank 0 alone goes by what it returns, for others may see an older list of files.
        should_stop: called once on every rank after each step, such as ``StopRequest.agreed``; it
            returns the same on all ranks. By default nothing stops.
        seed: seed of the order.
        group: the ranks that train; all ranks by default.

    Returns:
        The number of steps of the whole run. If it had come to its end before, nothing is trained
        or saved.

    Raises:
        SystemExit: on all ranks, with EXIT_STOPPED, when ``should_stop`` has returned true and the
            step is saved. After the last step, returns instead.
        RuntimeError: on all ranks: ``load`` or ``save`` has failed on rank 0. The text says why.

    An error of a collective, as when another rank has died, comes out as it is, so that the worker
    ends and the launcher can start all of them again.

    Cost: in each step, the gradients travel once, in all-reduces; at the start, the state does.
    """
    reached = _start(job, lambda: load(folder), group)
    while reached.epoch < num_epochs:
        order = _order(num_samples, seed, reached.epoch)
        batch = order[reached.position : reached.position + global_batch]
        _train(job, batch, reached.epoch, micro_batch, group)
        reached = reached.after(len(batch), num_samples)
        stops, is_last = should_stop(), reached.epoch == num_epochs
        if stops or is_last or reached.step % save_every == 0:
            _save(job, reached, lambda state, step: save(state, folder, step), group)
        if stops and not is_last:
            raise SystemExit(EXIT_STOPPED)
    return reached.step


class _Reached(NamedTuple):
    """How far a run has come: counted in samples, for no rank's share stays as it is."""

    step: int  # how many were done
    epoch: int
    position: int  # the first sample of the epoch's order that was not trained on

    def after(self, num_trained: int, num_samples: int) -> "_Reached":
        """Return what is reached with one more step."""
        position = self.position + num_trained
        if position == num_samples:
            return _Reached(self.step + 1, self.epoch + 1, 0)
        return _Reached(self.step + 1, self.epoch, position)


def _start(job: Job, load: Callable[[], Loaded | None], group: Group) -> _Reached:
    """Let all ranks continue from the checkpoint that rank 0 has found."""

    def found() -> tuple[int, dict[str, Any]]:
        loaded = load()
        if loaded is None:
            return 0, {"job": job.state_dict(), "epoch": 0, "position": 0}
        return loaded.step, loaded.state

    step, state = _on_rank_0(found, group)
    job.load_state_dict(state["job"])
    return _Reached(step, state["epoch"], state["position"])


def _save(
    job: Job, reached: _Reached, save: Callable[[dict[str, Any], int], object], group: Group
) -> None:
    """Save on rank 0; the others wait until that is durable."""

    def write() -> None:
        state = {"job": job.state_dict(), "epoch": reached.epoch, "position": reached.position}
        save(state, reached.step)

    _on_rank_0(write, group)


def _on_rank_0(do: Callable[[], Any], group: Group) -> Any:
    """Do something on rank 0 alone: all ranks get its result, or raise its error."""
    outcome: list[Any] = [None, ""]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = do()
        except Exception as error:  # the others wait for an answer
            outcome[1] = f"rank 0: {type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    result, reason = outcome
    if reason:
        raise RuntimeError(reason)
    return result


def _order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the samples as they come in an epoch, on however many ranks."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(num_samples).tolist()
    return order


def _train(job: Job, batch: Sequence[int], epoch: int, micro_batch: int, group: Group) -> None:
    """Train on a global batch, of which each rank does its share."""
    for parameter in job.parameters():
        parameter.grad = torch.zeros_like(parameter)  # also where the share is empty
    share = _share(batch, dist.get_rank(group), dist.get_world_size(group))
    for first in range(0, len(share), micro_batch):
        job.add_gradients(share[first : first + micro_batch], epoch)
    for parameter in job.parameters():
        gradient: Any = parameter.grad
        dist.all_reduce(gradient, group=group)
        gradient /= len(batch)  # a mean of the ranks' means would weigh small shares more
    job.step()


def _share(batch: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return a rank's part of the batch: 5 samples for 3 ranks are 2, 2 and 1."""
    size, longer = divmod(len(batch), world_size)
    first = rank * size + min(rank, longer)
    return batch[first : first + size + (rank < longer)]
