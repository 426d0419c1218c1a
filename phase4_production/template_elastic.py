"""Elastic training: workers come and go, and the result is the same as without failures.

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
    """Train ``job`` to the end, from where an earlier call, on any number of ranks, stopped.

    A launcher such as torchrun ends all workers when one dies or another joins, and restarts them
    with new ranks. Nine samples in global batches of four, with a checkpoint after each step; rank
    1 of two dies in step 2, and three continue:
        step   epoch   samples       2 ranks      3 ranks
        1      0       4 5 2 6       4 5 | 2 6                    saved
        2      0       3 8 7 0       3 8 | ✗      3 8 | 7 | 0     done again, saved
        3      0       1                          1   |   |       saved
        4      1       1 3 6 7                    1 3 | 6 | 7     saved

    Whatever happens, each sample is trained on once per epoch, not counting steps after the last
    checkpoint, which a failure undoes. Each step uses the samples that it would use on one rank
    without any failure, and the parameters are the same, up to rounding.

    Args:
        job: the training job. Its parameters may differ from rank to rank at first: all ranks
            continue from the newest checkpoint that rank 0 finds, or from the state of rank 0's job
            if there is none. Its gradients need not be cleared.
        folder: folder of the checkpoints.
        num_samples: samples in an epoch, at least 1. Their indices are 0 to num_samples − 1, in a
            different order in each epoch, which depends only on ``seed`` and the epoch.
        global_batch: samples in a step, with any number of ranks; at least 1. The last step of an
            epoch gets what is left. The ranks' shares differ by at most one sample, and may be
            empty.
        num_epochs: epochs of the whole run.
        save_every: number of steps between checkpoints, at least 1: one is saved after every step
            whose number is a multiple of this, and after the last.
        micro_batch: maximum number of samples that the job gets at once; at least 1. A larger share
            is cut into as few micro-batches as possible, whose gradients add up.
        save: function that makes a state durable as the checkpoint of a step, such as
            ``save_checkpoint``, which takes tensors, numbers and dicts. Only rank 0 calls it, and
            no rank begins another step, returns or exits before it has returned.
        load: function that returns the newest checkpoint in a folder, or None, such as
            ``load_checkpoint``. Only rank 0's result counts: others may see an older list of files.
        should_stop: function called once on every rank after each step, such as
            ``StopRequest.agreed``; it returns the same on all ranks. By default, nothing stops.
        seed: seed of the sample order.
        group: the ranks that train; all ranks by default.

    Returns:
        The number of steps of the whole run. If the run had already ended, nothing is trained or
        saved.

    Raises:
        SystemExit: on all ranks, with EXIT_STOPPED, when ``should_stop`` has returned true and the
            step is saved. After the last step, the function returns instead.
        RuntimeError: on all ranks, if ``load`` or ``save`` fails on rank 0; the message says why.

    An error in a collective, as when another rank has died, is passed on unchanged, so that the
    worker ends and the launcher can restart all workers.

    Cost: in each step, the gradients are sent once, in all-reduces; at the start, so is the state.
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
