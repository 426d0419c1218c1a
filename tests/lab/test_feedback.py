"""The training problem of tasks 4.9 to 4.11 is one that error feedback is needed for."""

import pytest
from phase4 import reduced as b
from phase4.judge_quantized import TRAINED as TRAINED_QUANTIZED
from phase4.judge_sparse import NUM_PARAMETERS, NUM_STEPS, TRAINED
from phase4.reduced import How

from distlab import launch
from solutions.phase4_production import gradient_compression as lesson


def _distance(how: How, feedback: str) -> float:
    args = (lesson, how, NUM_PARAMETERS, NUM_STEPS, feedback)
    x = launch.simulate(b.train, 2, *args).results[0]
    targets = [b.targets(NUM_PARAMETERS, rank, 2).tolist() for rank in range(2)]
    return max(abs(a - (c + d) / 2) for a, c, d in zip(x, *targets, strict=True))


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [
        (How("top_k", 1 / NUM_PARAMETERS), TRAINED["top_k"]),
        (How("threshold", 4.0), TRAINED["threshold"]),
        (How("quantized", "Sign"), TRAINED_QUANTIZED["Sign"]),
    ],
    ids=["top_k", "threshold", "Sign"],
)
def test_training_stands_still_without_feedback(how: How, tolerance: float) -> None:
    assert _distance(how, "own") < tolerance / 1.5
    assert _distance(how, "") > 1.2 * tolerance
