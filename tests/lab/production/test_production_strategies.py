"""All strategies train the same model, and reach the losses and predictions of a plain loop.

They do so on simulated ranks, and a sample of them in processes, too.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from little_runs import GPT, Case, Outcome, in_world, little, on_each_rank, plain, started

from distlab.production import lessons
from distlab.production.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fast_ranks")

COURSE = {"strategy": "course"}
RING = {**COURSE, "communication_pattern": "ring"}
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
    "fsdp in channels_last": {"strategy": "fsdp", "channels_last": True},
    "server in channels_last": {**SERVER, "channels_last": True},
    "zero 2 in channels_last": {**COURSE, "zero_redundancy": 2, "channels_last": True},
    "course": COURSE,
    "ring": RING,
    "tree": {**COURSE, "communication_pattern": "tree"},
    "one by one": {**COURSE, "gradients": "per_parameter", "communication_pattern": "naive"},
    "flat": {**COURSE, "gradients": "flat", "communication_pattern": "recursive_doubling"},
    "hierarchical": {**COURSE, "communication_pattern": "hierarchical"},
    "zero 1": {**COURSE, "zero_redundancy": 1},
    "zero 2": {**COURSE, "zero_redundancy": 2},
    "zero 3": {**COURSE, "zero_redundancy": 3},
    "server": SERVER,
    "ddp accumulates": {"accumulate": 3},
    "fsdp accumulates": {"strategy": "fsdp", "accumulate": 2},
    "zero 2 accumulates": {**COURSE, "zero_redundancy": 2, "accumulate": 2},
    "server accumulates": {**SERVER, "accumulate": 2},
    "fsdp clips": {"strategy": "fsdp", "clip_norm": 0.5},
    "course clips": {**COURSE, "clip_norm": 0.5},
    "zero 1 clips": {**COURSE, "zero_redundancy": 1, "clip_norm": 0.5},
    "ring zero 1 clips": {**RING, "zero_redundancy": 1, "clip_norm": 0.5},
    "zero 2 clips": {**COURSE, "zero_redundancy": 2, "accumulate": 2, "clip_norm": 0.5},
    "zero 3 clips": {**COURSE, "zero_redundancy": 3, "clip_norm": 0.5},
    "fsdp does not decay norms": {"strategy": "fsdp", **NO_DECAY},
    "gpt ddp": GPT,
    "gpt fsdp": {**GPT, "strategy": "fsdp"},
    "gpt ring": {**GPT, **COURSE, "communication_pattern": "ring"},
    "gpt zero 2": {**GPT, **COURSE, "zero_redundancy": 2, "accumulate": 2},
    "gpt zero 3": {**GPT, **COURSE, "zero_redundancy": 3},
    "gpt server": {**GPT, **SERVER},
}
PIPELINE = {**COURSE, "pipeline_parallelism": 2}
TENSOR = {**COURSE, "tensor_parallelism": 2}
BOTH = {**COURSE, "parallelism": "pp=2,tp=2"}
SPLIT: dict[str, Case] = {
    "pipeline": PIPELINE,
    "tensor": TENSOR,
    "both": BOTH,
    "ring pipeline": {**PIPELINE, "communication_pattern": "ring"},
    "pipeline zero 1": {**PIPELINE, "zero_redundancy": 1},
    "tensor zero 1": {**TENSOR, "zero_redundancy": 1},
    "pipeline does not decay norms": {**PIPELINE, **NO_DECAY},
    "flat pipeline": {**PIPELINE, "gradients": "flat"},
    "gpt flat both": {**GPT, **BOTH, "gradients": "flat"},
    "gpt pipeline": {**GPT, **PIPELINE},
    "gpt tensor": {**GPT, **TENSOR},
    "gpt both": {**GPT, **BOTH},
    "gpt pipeline zero 1": {**GPT, **PIPELINE, "zero_redundancy": 1},
    "gpt long pipeline": {**GPT, **COURSE, "parallelism": {"dp": 1, "pp": 4}},
}
PROCESSES_3: dict[str, Case] = {
    **{name: REPLICATED[name] for name in ("ddp", "fsdp", "zero 3", "server", "gpt zero 2")},
    "fsdp profiles": {"strategy": "fsdp", "profile": True},
    "course compiles": {**COURSE, "compile": True, "accumulate": 2},
    "shared memory": {**COURSE, "communication_pattern": "shared_memory"},
    "native": {**COURSE, "communication_pattern": "native"},
}
PROCESSES_4 = {name: SPLIT[name] for name in ("both", "gpt both", "gpt pipeline zero 1")}
WORLDS = {
    "alone": (1, "gloo", ALONE),
    "3 simulated ranks": (3, "sim", REPLICATED),
    "4 simulated ranks": (4, "sim", SPLIT),
    "3 processes": (3, "gloo", PROCESSES_3),
    "4 processes": (4, "gloo", PROCESSES_4),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns a case's outcomes on all ranks; each world runs once."""
    known: dict[str, dict[str, list[Outcome]]] = {}

    def found(world: str, name: str) -> list[Outcome]:
        if world not in known:
            size, backend, named = WORLDS[world]
            folder = tmp_path_factory.mktemp("world")
            cases = [{**case, "ema_decay": 0.5} for case in named.values()]
            by_rank = in_world(on_each_rank, size, folder, cases, backend=backend)
            known[world] = dict(zip(named, map(list, zip(*by_rank, strict=True)), strict=True))
        return known[world][name]

    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the outcomes of a plain loop, by the configuration key that changes them."""
    folder = tmp_path_factory.mktemp("plain")
    recipes: dict[str, Case] = {
        "": {},
        "clip_norm": {"clip_norm": 0.5},
        "decay_norms": NO_DECAY,
        "model": GPT,
    }
    return {key: plain(folder, ema_decay=0.5, **recipe) for key, recipe in recipes.items()}


def rows(values: Any) -> Any:
    return pytest.approx([number for row in values for number in row], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, (*_, cases) in WORLDS.items() for name in cases]
)
def test_a_strategy_trains_as_a_plain_loop(
    outcomes: Any, expected: dict[str, Outcome], world: str, name: str
) -> None:
    case = WORLDS[world][-1][name]
    right = expected[next((key for key in expected if key in case), "")]
    for found in outcomes(world, name):
        assert found["losses"] == pytest.approx(right["losses"], rel=1e-9)
        assert [epoch for epoch, *_ in found["accuracy"]] == [1, 2]
        assert found["accuracy"][-1][1:] == pytest.approx(right["results"], rel=1e-9)
    predicted = [found["logits"] for found in outcomes(world, name) if found["logits"]]
    assert predicted
    for logits in predicted:
        assert [x for row in logits for x in row] == rows(right["logits"])


@pytest.mark.usefixtures("alone")
def test_a_step_whose_gradients_cannot_be_clipped_is_refused(tmp_path: Path) -> None:
    case = {**COURSE, "zero_redundancy": 1, "clip_norm": 0.5}
    training = started(little(tmp_path / "run", **case))
    training.strategy.sharded.step = lambda: None  # a learner's, which reduces in its own way
    with pytest.raises(ConfigError, match=r"call self.reduce_gradients\(\) in step"):
        training.run()


def tied_weight(run_dir: Path, case: Case) -> list[float]:
    training = started(little(run_dir, **case))
    training.run()
    tied: list[float] = training.strategy.tied.flatten().tolist()
    return tied


@pytest.mark.parametrize("stage", [0, 1])
def test_embedding_and_head_keep_the_same_bits(tmp_path: Path, stage: int) -> None:
    """With three replicas and a ring, sums depend on the place of a gradient in its bucket."""
    ring: Case = {**RING, "parallelism": "pp=2"}
    case = {**GPT, **ring, "zero_redundancy": stage}
    first, *others = in_world(tied_weight, 6, tmp_path / "run", case, backend="sim")
    assert others == [first] * 5


def test_without_decay_of_norms_the_losses_are_others(expected: dict[str, Outcome]) -> None:
    """Show that the tests above can detect whether norms decay."""
    assert expected["decay_norms"]["losses"] != pytest.approx(expected[""]["losses"], rel=1e-3)


def without_services(run_dir: Path) -> list[int]:
    """Train with stand-ins for all lessons that serve a run; return the trained epochs."""
    cases: list[Case] = [{}, {**COURSE, "zero_redundancy": 1}, PIPELINE, SERVER]
    with mock.patch.object(lessons, "unwritten_services", return_value=[*lessons.SERVICES]):
        trainings = [started(little(run_dir / str(k), **case)) for k, case in enumerate(cases)]
    for training in trainings:
        training.run()
    return [training.progress.evaluated for training in trainings]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_every_strategy_trains_with_stand_ins(tmp_path: Path, backend: str) -> None:
    assert in_world(without_services, 2, tmp_path, backend=backend) == [[2] * 4] * 2
