"""Elastic training: workers come and go, and the result is the same as without failures.

Task 4.6. The docstring says what the function promises, its TODO gives an example, and
guidelines.md explains why and how. To grade it: ``distlab check 4.6``.
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
    # TODO 4.6: train step by step from the newest checkpoint on; return the number of steps.
    #   Example: 9 samples, global batches of 4, 2 epochs: 6 steps, of 4, 4, 1, 4, 4 and 1 samples.
    #     On 3 ranks, the shares of a step of 4 are 2, 1 and 1; those of a step of 1 are 1, 0 and 0.
    #   About 60 lines with all helpers.
    raise NotImplementedError(
        "Task 4.6: run_elastic, see guidelines.md#46-go-on-with-fewer-or-more-workers"
    )
