"""Elastic training: workers come and go, and the result is that of an undisturbed run.

Task 4.6. The docstring says what the function promises, its TODO what you need for it, and
guidelines.md why and how. To grade it: ``distlab check 4.6``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from phase4_production.given import Group, Job, Loaded


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
    # TODO 4.6: train step by step from the newest checkpoint on; return the number of steps.
    #   Tools: numpy.random.default_rng([seed, epoch]).permutation, dist.broadcast_object_list,
    #     dist.all_reduce, dist.get_rank, dist.get_world_size, EXIT_STOPPED (given).
    #   Example: 9 samples, global batches of 4, 2 epochs: 6 steps, of 4, 4, 1, 4, 4 and 1 samples.
    #     On 3 ranks, the shares of a step of 4 are 2, 1 and 1; those of a step of 1 are 1, 0 and 0.
    #   About 60 lines with all helpers.
    raise NotImplementedError(
        "Task 4.6: run_elastic, see guidelines.md#46-go-on-with-fewer-or-more-workers"
    )
