"""Task 2.10's judge tolerates rounding to bfloat16; its solution saves headers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from phase2 import drawings, pipelines
from phase2.judge_pipeline import _check_cases
from torch import Tensor, nn

from distlab.grade import Wrong
from distlab.sim import RankError, simulate
from solutions.phase2_advanced import pipeline_parallel

SIZES = [(9, 3, 11, 4), (9, 7, 4, 3), (11, 5, 8, 6)]  # with these, the solution was once rejected


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_in_16_bits_may_be_rounded_and_not_be_others(sizes: tuple[int, ...]) -> None:
    cases = [(drawings.ONE_F_ONE_B_3_4, [*sizes], "bfloat16")]
    results = simulate(pipelines.run_pipelines, 3, pipeline_parallel, cases).results
    _check_cases(results, cases)
    gradients = results[2][0]["gradients"][0]
    gradients["layer.bias"] = (1.02 * torch.tensor(gradients["layer.bias"])).tolist()
    with pytest.raises(Wrong, match=r"rank 2 of 3, block 2: the gradient of layer\.bias"):
        _check_cases(results, cases)


class Cut(nn.Module):
    """Drops columns of its input if the first number is negative: a format of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] if x[0, 0] < 0 else 2 * x


def interleaved(sizes: list[int], block: Callable[[], nn.Module]) -> None:
    """Train on two stages of two blocks; micro-batch i is filled with 1 - i."""
    schedule = pipeline_parallel.interleaved_schedule(2, len(sizes), 2)
    batches = [(torch.full((size, 3), 1.0 - i), torch.ones(1)) for i, size in enumerate(sizes)]
    pipeline_parallel.run_schedule(schedule, [block(), block()], batches, pipelines.SQUARES)


def test_only_the_first_output_of_a_size_has_a_header() -> None:
    few, many = (
        simulate(interleaved, 2, sizes, partial(nn.Linear, 3, 3)).trace.messages
        for sizes in ([2, 5, 5, 2], [2, 5, 5, 2, 5, 2, 2, 5])
    )
    assert [b - a for a, b in zip(few, many, strict=True)] == [4 * 3, 4 * 3]  # no headers


def test_an_output_is_refused_if_equal_inputs_had_one_of_another_shape() -> None:
    with pytest.raises(RankError, match=r"rank 0, F2: the output is .*2, 2.*it was .*2, 3"):
        simulate(interleaved, 2, [2, 2, 2, 2], Cut)
