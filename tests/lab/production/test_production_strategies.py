"""All strategies train the same model, and reach the losses and predictions of a plain loop."""

from typing import Any

import pytest
from little_runs import Case, Outcome, in_world, on_each_rank, plain

pytestmark = pytest.mark.usefixtures("fast_ranks")

COURSE = {"strategy": "course"}
NO_DECAY = {"weight_decay": 0.5, "decay_norms": False}
ALONE: dict[str, Case] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "accumulate": {"accumulate": 3},
    "zero 3": {**COURSE, "zero_redundancy": 3},
    "workers load": {"num_workers": 1},
}
SERVER = {**COURSE, "communication_pattern": "parameter_server"}
REPLICATED: dict[str, Case] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "course": COURSE,
    "ring": {**COURSE, "communication_pattern": "ring"},
    "tree": {**COURSE, "communication_pattern": "tree"},
    "hierarchical": {**COURSE, "communication_pattern": "hierarchical"},
    "zero 1": {**COURSE, "zero_redundancy": 1},
    "zero 2": {**COURSE, "zero_redundancy": 2},
    "zero 3": {**COURSE, "zero_redundancy": 3},
    "server": SERVER,
    "ddp accumulates": {"accumulate": 3},
    "fsdp profiles": {"strategy": "fsdp", "profile": True},
    "course compiles": {**COURSE, "compile": True, "accumulate": 2},
    "fsdp accumulates": {"strategy": "fsdp", "accumulate": 2},
    "zero 2 accumulates": {**COURSE, "zero_redundancy": 2, "accumulate": 2},
    "server accumulates": {**SERVER, "accumulate": 2},
    "fsdp clips": {"strategy": "fsdp", "clip_norm": 0.5},
    "course clips": {**COURSE, "clip_norm": 0.5},
    "fsdp does not decay norms": {"strategy": "fsdp", **NO_DECAY},
}
PIPELINE = {**COURSE, "pipeline_parallelism": 2}
TENSOR = {**COURSE, "tensor_parallelism": 2}
SPLIT: dict[str, Case] = {
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "both": {**PIPELINE, "tensor_parallelism": 2},
    "ring pipeline": {**PIPELINE, "communication_pattern": "ring"},
    "pipeline zero 1": {**PIPELINE, "zero_redundancy": 1},
    "tensor zero 1": {**TENSOR, "zero_redundancy": 1},
    "pipeline does not decay norms": {**PIPELINE, **NO_DECAY},
}
CASES = {1: ALONE, 3: REPLICATED, 4: SPLIT}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a case's outcomes on all ranks; each world runs once."""
    known: dict[int, dict[str, list[Outcome]]] = {}

    def found(size: int, name: str) -> list[Outcome]:
        if size not in known:
            folder = tmp_path_factory.mktemp(f"world{size}")
            cases = [{**case, "ema_decay": 0.5} for case in CASES[size].values()]
            by_rank = in_world(on_each_rank, size, folder, cases)
            by_case = zip(*by_rank, strict=True)
            known[size] = dict(zip(CASES[size], map(list, by_case), strict=True))
        return known[size][name]

    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the outcomes of a plain loop, by the configuration key that changes them."""
    folder = tmp_path_factory.mktemp("plain")
    recipes: dict[str, Case] = {"": {}, "clip_norm": {"clip_norm": 0.5}, "decay_norms": NO_DECAY}
    return {key: plain(folder, ema_decay=0.5, **recipe) for key, recipe in recipes.items()}


def rows(values: Any) -> Any:
    return pytest.approx([number for row in values for number in row], rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in CASES for name in CASES[size]])
def test_a_strategy_trains_as_a_plain_loop(
    outcomes: Any, expected: dict[str, Outcome], size: int, name: str
) -> None:
    right = expected[next((key for key in expected if key in CASES[size][name]), "")]
    for found in outcomes(size, name):
        assert found["losses"] == pytest.approx(right["losses"], rel=1e-4)
        assert [x for row in found["logits"] for x in row] == rows(right["logits"])
        assert [epoch for epoch, *_ in found["accuracy"]] == [1, 2]
        assert found["accuracy"][-1][1:] == pytest.approx((right["top1"], right["top5"]))


def test_without_decay_of_norms_the_losses_are_others(expected: dict[str, Outcome]) -> None:
    """Show that the tests above can detect whether norms decay."""
    assert expected["decay_norms"]["losses"] != pytest.approx(expected[""]["losses"], rel=1e-3)
