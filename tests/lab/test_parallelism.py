"""``distlab train --parallelism``: replicas, stages and shards give the losses of one process."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import distlab
from ranks import on_ranks

from distlab import chosen, training
from distlab.grade.submission import Submission
from distlab.parallel import Parallelism
from solutions.phase1_data_parallel.trainer import EpochResult

ROOT = Path(__file__).parents[2]
ALL = "dp=2,pp=2,tp=2"
SMALL = {"image_shape": (1, 4, 4), "train_size": 56, "test_size": 21}  # not multiples of the batch
STEPS = 6  # two epochs of three batches of 18 samples


def config_of(**options: Any) -> training.TrainConfig:
    settings = {"batch_size": 18, "epochs": 2, "dtype": "float64", "seed": 3, **options}
    return training.make_config(dataset="synthetic", **settings)


def trains(config: training.TrainConfig) -> list[EpochResult]:
    """Train as one worker, on a smaller data set than the command's."""
    training.SYNTHETIC_FOR_GPT = SMALL
    return training.train_on_rank(config)


def train(config: training.TrainConfig, backend: str) -> list[list[EpochResult]]:
    by_rank: list[list[EpochResult]] = on_ranks(trains, config.num_workers, config, backend=backend)
    return by_rank


@cache
def alone() -> list[EpochResult]:
    """Train in one process, with the whole model and every batch."""
    (history,) = train(config_of(model="gpt", num_workers=1), "gloo")
    assert sum(len(epoch.step_losses) for epoch in history) == STEPS
    return history


def assert_trains_as_one_process(by_rank: list[list[EpochResult]]) -> None:
    for history in by_rank:
        for epoch, expected in zip(history, alone(), strict=True):
            assert epoch.step_losses == pytest.approx(expected.step_losses, rel=0, abs=1e-9)
            assert epoch.test_loss == pytest.approx(expected.test_loss, rel=0, abs=1e-9)
            assert epoch.test_accuracy == expected.test_accuracy


@pytest.mark.parametrize(
    ("sizes", "backend", "how"),
    [
        (ALL, "sim", {}),
        ("dp=3,pp=2", "sim", {"gradients": "flat", "all_reduce": "recursive_doubling"}),
        ("pp=3", "sim", {}),  # one stage gets two of the 4 blocks
        ("pp=2,tp=2", "gloo", {}),
    ],
)
def test_every_mesh_loses_what_one_process_does(
    sizes: str, backend: str, how: dict[str, str]
) -> None:
    assert_trains_as_one_process(train(config_of(parallelism=sizes, **how), backend))


def test_rank_0_says_what_each_rank_holds_and_how_long_the_cluster_takes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = config_of(parallelism=ALL, epochs=1, backend="sim", cluster="dgx-h100")
    on_ranks(trains, 8, config, backend="sim", cluster="dgx-h100")
    first, mesh, epoch, *traffic, virtual = capfd.readouterr().out.splitlines()
    assert first.startswith("rank 0/8  gpt (202,112 parameters) on synthetic (56 images of 15 tok")
    assert "batch 18 = 2 x 9, " in first
    # A block has 12E² + 13E values, where E = 64. A shard has half of the block's matrices
    # (24,576), half of the biases of query, key, value and up (224), and all other biases and norms
    # (384). Besides the shards of two blocks, a rank of the first stage has the embedding,
    # (17 + 15)E, and a rank of the last stage has the norm and the head, (2 + 17)E.
    assert mesh == (
        "rank 0/8  mesh dp=2,pp=2,tp=2; parameters per rank: stage 0 52,416, stage 1 51,584; "
        "micro-batches of 2"
    )
    assert epoch.startswith("rank 0/8  epoch 1  loss ")
    names = [re.findall(r"collectives per epoch \((.*)\): [^n]", line) for line in traffic]
    assert names == [["dp"], ["pp"], ["tp"], ["first and last stage"]]
    assert re.fullmatch(r"rank 0/8  virtual time [\d.]+ ms", virtual)


def test_the_command_trains_in_processes(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--parallelism", "tp=2", "--dataset", "synthetic", "--batch-size", "512"]
    assert distlab("train", *options, "--epochs", "1") == 0
    first, mesh, epoch, last = capfd.readouterr().out.splitlines()
    assert "batch 512 = 1 x 512, " in first
    assert mesh == "rank 0/2  mesh tp=2; parameters per rank: 105,984"
    assert epoch.startswith("rank 0/2  epoch 1  loss 2.")
    assert last.startswith("test accuracy ")


# --- a learner's lessons -------------------------------------------------------------------------

LESSONS = {
    "phase1_data_parallel": ("data_loader", "collectives", "trainer"),
    "phase2_advanced": (
        *("gradient_accumulation", "model_parallel", "pipeline_parallel", "tensor_parallel"),
    ),
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Make a folder in which all lessons are written as in the solutions."""
    for phase, lessons in LESSONS.items():
        (tmp_path / phase).mkdir()
        for lesson in lessons:
            text = (ROOT / "solutions" / phase / f"{lesson}.py").read_text(encoding="utf-8")
            (tmp_path / phase / f"template_{lesson}.py").write_text(
                text.replace(f"from solutions.{phase}.", f"from {phase}.template_"),
                encoding="utf-8",
            )
    return tmp_path


def trains_with(config: training.TrainConfig, root: Path) -> list[list[EpochResult]]:
    own = training.TrainConfig(**{**vars(config), "lessons": Submission(root)})
    return train(own, "sim")


@pytest.mark.parametrize(
    ("lesson", "sizes", "right", "wrong"),
    [
        ("pipeline_parallel", "pp=2", "grad /= num_targets", "grad /= 2 * num_targets"),
        ("tensor_parallel", "tp=2", "_same, backward=_reduced", "_same, backward=_same"),
    ],
)
def test_it_is_the_learner_s_own_parts_that_train(
    own: Path, lesson: str, sizes: str, right: str, wrong: str
) -> None:
    path = own / "phase2_advanced" / f"template_{lesson}.py"
    text = path.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    config = config_of(parallelism=sizes, epochs=1)
    [[epoch], *_] = trains_with(config, own)
    differences = [
        abs(a - b) for a, b in zip(epoch.step_losses, alone()[0].step_losses, strict=True)
    ]
    assert differences[0] < 1e-9, "before the first step the model is the same"
    assert min(differences[1:]) > 1e-9


def test_parts_that_are_not_written_yet_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(chosen.NotThereError) as refused:
        config_of(parallelism="tp=2", impl="mine")
    assert "the 12 tasks 1.1, 1.2, 1.5, " in str(refused.value)
    assert ", 1.13, 2.14, 2.15, 2.16 and 2.17. Go on with: distlab check 1.1" in str(refused.value)
    assert "2.12" not in str(refused.value)
    with pytest.raises(chosen.NotThereError) as refused:
        config_of(parallelism="pp=2", impl="mine")
    assert ", 1.13, 2.1, 2.8, 2.9, 2.11 and 2.12. " in str(refused.value)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes", "written"),
    [
        ("dp=2,pp=3,tp=4", Parallelism(2, 3, 4), "dp=2,pp=3,tp=4"),
        ("tp=4, dp=2", Parallelism(dp=2, tp=4), "dp=2,tp=4"),
        ("pp=12", Parallelism(pp=12), "pp=12"),
        ("pp=1", Parallelism(), "dp=1"),
    ],
)
def test_sizes_come_in_any_order_and_those_left_out_are_1(
    text: str, sizes: Parallelism, written: str
) -> None:
    assert Parallelism.parse(text) == sizes
    assert str(sizes) == written
    assert Parallelism.parse(written) == sizes


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("dp=2,dp=2", "--parallelism dp=2,dp=2: dp is there twice: write dp=2,pp=2,tp=2"),
        (
            "dp=2,pp=2,tp=2 --num-workers 4",
            "--parallelism dp=2,pp=2,tp=2: 2 x 2 x 2 = 8 ranks, but --num-workers asks for 4: "
            "leave --num-workers out",
        ),
        (
            "pp=2 --model cnn",
            "--parallelism pp=2 splits the model, and only gpt can be split: leave --model cnn "
            "out, or use --parallelism dp=2",
        ),
        (
            "dp=3,tp=2 --batch-size 64",
            "--batch-size 64 cannot be shared equally by 3 replicas: use 63 or 66",
        ),
        (
            "dp=2,pp=4 --batch-size 6",
            "--parallelism dp=2,pp=4: --batch-size 6 gives each replica 3 samples, fewer than its "
            "4 stages: use --batch-size 8 or more",
        ),
        (
            "tp=3",
            "--parallelism tp=3: 4 attention heads cannot be shared equally by 3 ranks: "
            "use tp=1, tp=2 or tp=4",
        ),
        (
            "pp=5",
            "--parallelism pp=5: each of 5 stages needs a block, and the model has 4: "
            "use pp=4 or less",
        ),
        (
            "pp=2,tp=2 --batch-size 5000",
            "--batch-size 5000 is more than the 512 training images of synthetic: use at most 512",
        ),
    ],
)
def test_sizes_that_cannot_work_get_one_line_with_ones_that_do(
    options: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--backend", "sim", "--dataset", "synthetic"]
    assert distlab("train", *where, "--parallelism", *options.split()) == 2
    assert capfd.readouterr() == ("", f"distlab train: {line}\n")
