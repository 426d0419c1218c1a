"""Elastic training: workers come and go, and the result is the same as without failures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

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
    """Train ``job`` to the end, continuing where an earlier call stopped, on any number of ranks.

    A launcher such as torchrun ends all workers when one dies or another joins, and restarts them
    with new ranks. In this example, an epoch has nine samples, in global batches of four, and each
    step is followed by a checkpoint; rank 1 of two dies in step 2, and three ranks continue:
        step   epoch   samples       2 ranks      3 ranks
        1      0       4 5 2 6       4 5 | 2 6                    saved
        2      0       3 8 7 0       3 8 | ✗      3 8 | 7 | 0     repeated, saved
        3      0       1                          1   |   |       saved
        4      1       1 3 6 7                    1 3 | 6 | 7     saved

    Whatever happens, each sample is trained on once per epoch, not counting steps after the last
    checkpoint, which a failure undoes. Each step uses the samples that it would use on one rank
    without failures, and results in the same parameters, up to rounding.

    Args:
        job: the training job. Its parameters may differ from rank to rank at first: all ranks
            continue from the newest checkpoint that rank 0 finds, or from the state of rank 0's job
            if it finds none. The job's gradients need not be cleared. In ``job.step``, a parameter
            that no rank has used in the step may have zeros or None as its gradient.
        folder: folder of the checkpoints.
        num_samples: samples in an epoch, at least 1. Their indices are 0 to num_samples − 1. Each
            epoch has a different order, which depends only on ``seed`` and the epoch.
        global_batch: samples in a step, whatever the number of ranks; at least 1. The last step of
            an epoch gets the samples that are left. The ranks' shares differ by at most one sample,
            and may be empty.
        num_epochs: epochs of the whole run.
        save_every: number of steps between checkpoints, at least 1. A checkpoint is saved after
            every step whose number is a multiple of this, and after the last step.
        micro_batch: maximum number of samples that the job gets in one call; at least 1. A larger
            share is cut into as few micro-batches as possible, whose gradients add up.
        save: function that durably saves a state as the checkpoint of a step, such as
            ``save_checkpoint``, which accepts tensors, numbers and dicts. Only rank 0 calls it, and
            no rank begins another step, returns or exits before it has returned.
        load: function, such as ``load_checkpoint``, that returns the newest checkpoint in a folder,
            or None if there is none. Only rank 0's result counts, because other ranks may see an
            outdated list of files.
        should_stop: function called once on every rank after each step, such as
            ``StopRequest.agreed``; it returns the same on all ranks. By default, the run never
            stops early.
        seed: seed of the sample order.
        group: the ranks that train; all ranks by default.

    Returns:
        The number of steps of the whole run. If the run had already ended, nothing is trained or
        saved.

    Raises:
        SystemExit: on all ranks, with EXIT_STOPPED, once ``should_stop`` has returned true and the
            step has been saved. After the last step, the function returns instead.
        RuntimeError: on all ranks, if ``load`` or ``save`` fails on rank 0; the message says why.

    An error in a collective, for example because another rank has died, propagates unchanged, so
    that the worker ends and the launcher can restart all workers.

    Cost: in each step, the gradients are sent once, in all-reduces. The state is sent once, at the
        start.
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
    """Progress of a run, counted in samples, because the ranks' shares may change."""

    step: int  # number of completed steps
    epoch: int
    position: int  # index in the epoch's order of the next sample to train on

    def after(self, num_trained: int, num_samples: int) -> "_Reached":
        """Return the progress after one more step."""
        position = self.position + num_trained
        if position == num_samples:
            return _Reached(self.step + 1, self.epoch + 1, 0)
        return _Reached(self.step + 1, self.epoch, position)


def _start(job: Job, load: Callable[[], Loaded | None], group: Group) -> _Reached:
    """Make all ranks continue from the checkpoint that rank 0 has found."""

    def found() -> tuple[int, dict[str, Any]]:
        loaded = load()
        if loaded is None:
            return 0, {"job": _on_cpu(job.state_dict()), "epoch": 0, "position": 0}
        return loaded.step, loaded.state

    step, state = _on_rank_0(found, group)
    job.load_state_dict(state["job"])
    return _Reached(step, state["epoch"], state["position"])


def _on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU: else all ranks would put them on rank 0's GPU."""
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    return state.cpu() if isinstance(state, Tensor) else state


def _save(
    job: Job, reached: _Reached, save: Callable[[dict[str, Any], int], object], group: Group
) -> None:
    """Save on rank 0; the others wait until the checkpoint is durable."""

    def write() -> None:
        state = {"job": job.state_dict(), "epoch": reached.epoch, "position": reached.position}
        save(state, reached.step)

    _on_rank_0(write, group)


def _on_rank_0(do: Callable[[], Any], group: Group) -> Any:
    """Call ``do`` on rank 0 only: all ranks get its result, or raise its error."""
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
    """Return the order of the samples in an epoch, for any number of ranks."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(num_samples).tolist()
    return order


def _train(job: Job, batch: Sequence[int], epoch: int, micro_batch: int, group: Group) -> None:
    """Train on a global batch; each rank takes its share."""
    for parameter in job.parameters():
        parameter.grad = torch.zeros_like(parameter)  # even where the share is empty
    share = _share(batch, dist.get_rank(group), dist.get_world_size(group))
    for first in range(0, len(share), micro_batch):
        job.add_gradients(share[first : first + micro_batch], epoch)
    _average([parameter.grad for parameter in job.parameters()], len(batch), group)
    job.step()


def _average(gradients: Sequence[Any], num_samples: int, group: Group) -> None:
    """Divide the sums over all ranks by the number of samples, with one all-reduce for all."""
    total = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(total, group=group)
    total /= num_samples  # a mean of the ranks' means would give small shares more weight
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, total.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def _share(batch: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return a rank's share of the batch: 3 ranks get 2, 2 and 1 of 5 samples."""
    size, longer = divmod(len(batch), world_size)
    first = rank * size + min(rank, longer)
    return batch[first : first + size + (rank < longer)]
