"""Task 2.12's judge tolerates rounding to bfloat16, which grows with the gradient, but no more."""

import pytest
import torch
from phase2 import drawings, pipelines
from phase2.judge_pipeline import _check_cases

from distlab.grade import Wrong
from distlab.sim import simulate
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
