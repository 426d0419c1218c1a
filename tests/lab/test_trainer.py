"""Data-parallel training: N ranks do what one process does, in float64 to rounding."""

import io
import re
import sys
from collections.abc import Callable
from functools import cache
from itertools import chain, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD_SIZES, on_members, on_ranks, refusal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from solutions.phase1_data_parallel.collectives import ALL_REDUCES, Group
from solutions.phase1_data_parallel.data_loader import Batch, Sample, shard_indices
from solutions.phase1_data_parallel.trainer import (
    AVERAGE_GRADIENTS,
    EpochResult,
    Evaluation,
    RankLog,
    Trainer,
    broadcast_parameters,
    evaluate,
    train_step,
)

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(state: State, expected: State, tolerance: float) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


# --- broadcast_parameters ------------------------------------------------------------------------


class Awkward(nn.Module):
    """Parameters and buffers of every kind that is easily forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(torch.float32, memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(2).bfloat16(), requires_grad=False)
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(40) < 0.5)
        self.register_buffer("absent", None)
        with torch.no_grad():
            for statistic in self.norm.buffers():
                statistic.copy_(torch.randint(100, statistic.shape))


def layout(model: nn.Module) -> list[tuple[int, int, tuple[int, ...]]]:
    """Which objects, at which address, in which order in memory."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(tensor), tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def broadcasts(group: Group = None) -> list[tuple[State, State, bool]]:
    """State before and after, whether in place; from the first rank and from the last."""
    results = []
    for src in (0, dist.get_world_size(group) - 1):
        torch.manual_seed(100 * src + dist.get_rank())
        model = Awkward()
        before, where = state_of(model), layout(model)
        broadcast_parameters(model, src, group)
        in_place = layout(model) == where and model.head.weight is model.embedding.weight
        results.append((before, state_of(model), in_place))
    return results


def check_broadcast(by_rank: list[list[tuple[State, State, bool]]]) -> None:
    for case, src in enumerate((0, len(by_rank) - 1)):
        expected = by_rank[src][case][0]
        assert set(expected) >= {"norm.num_batches_tracked", "norm.running_mean", "mask", "scalar"}
        for results in by_rank:
            _, after, in_place = results[case]
            assert in_place
            assert_close(after, expected, 0.0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_makes_parameters_and_buffers_those_of_the_source_in_place(
    world_size: int,
) -> None:
    check_broadcast(on_ranks(broadcasts, world_size))


# --- average_gradients ---------------------------------------------------------------------------


class Weights(nn.Module):
    """Nothing but parameters: five trainable ones, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(7))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.image = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.rare = nn.Parameter(torch.zeros(4))  # gets a gradient on odd ranks only
        self.unused = nn.Parameter(torch.zeros(6))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.again = self.plain


def gradients_of(rank: int) -> State:
    generator = torch.Generator().manual_seed(rank)
    sizes = {name: weight.shape for name, weight in Weights().named_parameters()}
    drawn = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    drawn["image"] = drawn["image"].to(memory_format=torch.channels_last)
    return {
        name: gradient
        for name, gradient in drawn.items()
        if name != "unused" and (name != "rare" or rank % 2)
    }


def gradients(weights: dict[str, nn.Parameter]) -> State:
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def counting(name: str) -> tuple[Callable[[Tensor, Group], None], list[int]]:
    """An all-reduce, and the numbers of elements it was called with."""
    calls: list[int] = []

    def all_reduce(x: Tensor, group: Group = None) -> None:
        calls.append(x.numel())
        ALL_REDUCES[name](x, group)

    return all_reduce, calls


Averages = dict[tuple[str, str], tuple[State, list[int], bool]]


def averages(group: Group = None) -> Averages:
    """Gradients, calls and whether in place, by all-reduce and way to average."""
    results = {}
    for name, way in product(ALL_REDUCES, AVERAGE_GRADIENTS):
        model, (all_reduce, calls) = Weights(), counting(name)
        weights = dict(model.named_parameters())
        for parameter, gradient in gradients_of(dist.get_rank(group)).items():
            weights[parameter].grad = gradient
        before = gradients(weights)
        AVERAGE_GRADIENTS[way](model, all_reduce, group)
        after = gradients(weights)
        in_place = all(after[name] is old for name, old in before.items())
        results[name, way] = after, calls, in_place
    return results


def check_averages(by_rank: list[Averages]) -> None:
    world_size = len(by_rank)
    of_ranks = [gradients_of(rank) for rank in range(world_size)]
    expected = {
        name: torch.stack([g.get(name, torch.zeros_like(weight)) for g in of_ranks]).mean(dim=0)
        for name, weight in Weights().named_parameters()
    }
    for rank, by_name in enumerate(by_rank):
        for (_, way), (averaged, calls, in_place) in by_name.items():
            assert in_place
            assert_close(averaged, {**expected, "frozen": of_ranks[rank]["frozen"]}, 1e-6)
            sizes = sorted([7, 1, 2 * 3 * 4 * 5, 4, 6])
            assert sorted(calls) == (sizes if way == "per_parameter" else [sum(sizes)])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradients_become_means_by_one_all_reduce_each_or_in_all_and_frozen_ones_stay(
    world_size: int,
) -> None:
    check_averages(on_ranks(averages, world_size))


# --- train_step ----------------------------------------------------------------------------------

NUM_STEPS = 4
SHARDS = {  # samples of every rank
    1: (5,),
    2: (3, 1),
    3: (4, 0, 1),
    4: (2, 3, 0, 2),
    5: (1, 0, 0, 0, 6),
    8: (1, 2, 0, 3, 1, 0, 1, 2),
}


def classifier(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def language_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Tanh(), head).double()


def images(num_samples: int, seed: int) -> Batch:
    """(B, 6) and (B)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(dim=1)


def texts(num_samples: int, seed: int) -> Batch:
    """(B, T) and (B, T), T = 5."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (num_samples, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


TASKS = {"images": (classifier, images), "texts": (language_model, texts)}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def trains(group: Group = None) -> dict[tuple[str, str], tuple[list[float], State, list[int]]]:
    """Losses, weights and all-reduces after some steps, by task and strategy."""
    rank, shards = dist.get_rank(group), SHARDS[dist.get_world_size(group)]
    results = {}
    for task, (build, draw) in TASKS.items():
        for name in ALL_REDUCES:
            model, (all_reduce, calls) = build(), counting(name)
            optimizer, losses = momentum(model), []
            for step in range(NUM_STEPS):
                inputs, targets = draw(sum(shards), step)
                mine = inputs.split(shards)[rank], targets.split(shards)[rank]
                losses.append(
                    train_step(model, optimizer, mine, all_reduce=all_reduce, group=group)
                )
            results[task, name] = losses, state_of(model), calls
    return results


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """What plain PyTorch does in one process."""
    loss = cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@cache
def alone(task: str, num_samples: int) -> tuple[list[float], State]:
    build, draw = TASKS[task]
    model = build()
    optimizer = momentum(model)
    losses = [step_alone(model, optimizer, draw(num_samples, step)) for step in range(NUM_STEPS)]
    return losses, state_of(model)


@cache
def trained(world_size: int) -> list[dict[tuple[str, str], tuple[list[float], State, list[int]]]]:
    return on_ranks(trains, world_size)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_steps_on_uneven_shards_are_those_of_one_process_on_the_whole_batch(
    world_size: int, task: str
) -> None:
    expected_losses, expected = alone(task, sum(SHARDS[world_size]))
    for name in ALL_REDUCES:
        results = [rank[task, name] for rank in trained(world_size)]
        for losses, state, _ in results:
            assert losses == results[0][0], "the loss must be equal on all ranks"
            assert losses == pytest.approx(expected_losses, abs=1e-12)
            assert_close(state, expected, 1e-12)


def test_step_needs_one_small_all_reduce_and_one_for_each_trainable_parameter() -> None:
    for rank in trained(3):
        assert rank["images", "naive"][2] == NUM_STEPS * [2, 8 * 6, 8, 3 * 8, 3]
        assert rank["texts", "naive"][2] == NUM_STEPS * [2, 11 * 6, 11]


def steps_without_samples() -> str:
    model = classifier()
    return refusal(lambda: train_step(model, momentum(model), images(0, 0)))


def test_step_without_any_sample_is_an_error_on_every_rank() -> None:
    says = "train_step: the batches of all ranks are empty"
    assert on_ranks(steps_without_samples, 3) == [says] * 3


# --- evaluate ------------------------------------------------------------------------------------

DATA_SIZES = (1, 2, 3, 7, 16, 23)


class Watched(Dataset[Sample]):
    """Notes which samples were asked for."""

    def __init__(self, samples: Batch) -> None:
        self.samples, self.seen = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples[0])

    def __getitem__(self, index: int) -> Sample:
        self.seen.append(index)
        return self.samples[0][index], self.samples[1][index]


def normalising_model(seed: int = 0) -> nn.Sequential:
    """In training mode it gives other results, different ones on every rank."""
    model = classifier(seed)
    norm = nn.BatchNorm1d(8, dtype=torch.float64)
    norm.running_mean = torch.randn(8, dtype=torch.float64)
    return nn.Sequential(model[0], norm, nn.Dropout(0.3), model[1], model[2])


def evaluates(group: Group = None) -> list[tuple[Evaluation, list[int], bool]]:
    """Result, samples seen and whether the model is as before, by data size and batch size."""
    results = []
    for num_samples in DATA_SIZES:
        for batch_size in (2, 256):
            data, model = Watched(images(num_samples, 7)), normalising_model()
            before = state_of(model)
            result = evaluate(model, data, batch_size=batch_size, group=group)
            after = state_of(model)
            unchanged = all(torch.equal(after[name], value) for name, value in before.items())
            results.append((result, data.seen, unchanged))
    data = Watched(texts(9, 7))
    results.append((evaluate(language_model(), data, group=group), data.seen, True))
    return results


def evaluated_alone(model: nn.Module, samples: Batch) -> Evaluation:
    inputs, targets = samples
    with torch.no_grad():
        logits = model.eval()(inputs).flatten(0, -2)
    accuracy = (logits.argmax(dim=1) == targets.flatten()).double().mean().item()
    return Evaluation(cross_entropy(logits, targets.flatten()).item(), accuracy, targets.numel())


def check_evaluated(by_rank: list[list[tuple[Evaluation, list[int], bool]]]) -> None:
    sizes = [size for size in DATA_SIZES for _ in range(2)]
    expected = [evaluated_alone(normalising_model(), images(size, 7)) for size in sizes]
    expected.append(evaluated_alone(language_model(), texts(9, 7)))
    for case, one_process in enumerate(expected):
        results, seen, unchanged = zip(*(rank[case] for rank in by_rank), strict=True)
        assert set(results) == {results[0]}
        assert results[0].loss == pytest.approx(one_process.loss, abs=1e-12)
        assert results[0].accuracy == pytest.approx(one_process.accuracy, abs=1e-12)
        assert results[0].num_targets == one_process.num_targets
        assert sorted(chain(*seen)) == list(range([*sizes, 9][case]))
        assert all(unchanged)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_evaluation_counts_every_sample_once_and_is_that_of_one_process(world_size: int) -> None:
    check_evaluated(on_ranks(evaluates, world_size))


def keeps_modes(training: bool, norm_training: bool) -> bool:
    model = normalising_model().train(training)
    model[1].train(norm_training)
    before = [module.training for module in model.modules()]
    evaluate(model, Watched(images(5, 0)))
    return [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    ("training", "norm_training"),
    [
        pytest.param(True, True, id="training"),
        pytest.param(False, False, id="evaluation"),
        pytest.param(True, False, id="training with BatchNorm frozen"),
    ],
)
def test_evaluation_leaves_every_module_in_the_mode_it_was_in(
    training: bool, norm_training: bool
) -> None:
    assert on_ranks(keeps_modes, 2, training, norm_training) == [True, True]


class Breaks(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError(f"no room for {len(inputs)} samples")


def keeps_modes_when_it_fails() -> tuple[str, list[bool]]:
    model = nn.Sequential(nn.BatchNorm1d(6).eval(), Breaks())
    model.double()
    text = refusal(lambda: evaluate(model, Watched(images(5, 0)), batch_size=2))
    return text, [module.training for module in model.modules()]


def test_evaluation_that_fails_leaves_every_module_in_the_mode_it_was_in() -> None:
    answer = ("no room for 2 samples", [True, False, True])
    assert on_ranks(keeps_modes_when_it_fails, 2) == [answer] * 2


def evaluates_nothing() -> str:
    return refusal(lambda: evaluate(classifier(), Watched(images(0, 0))))


def test_evaluation_of_nothing_is_an_error_on_every_rank() -> None:
    assert on_ranks(evaluates_nothing, 3) == ["evaluate: the data set is empty"] * 3


# --- RankLog -------------------------------------------------------------------------------------


def logs() -> None:
    log = RankLog()
    log.info("the same everywhere")
    log.warning(f"disk {log.rank} is full")


def lines_of(output_dir: Path, world_size: int) -> list[list[str]]:
    return [
        (output_dir / f"rank-{rank}.log").read_text().splitlines() for rank in range(world_size)
    ]


def test_info_comes_from_rank_0_and_warnings_from_all(tmp_path: Path) -> None:
    on_ranks(logs, 3, output_dir=tmp_path)
    assert lines_of(tmp_path, 3) == [
        ["rank 0/3  the same everywhere", "rank 0/3  disk 0 is full"],
        ["rank 1/3  disk 1 is full"],
        ["rank 2/3  disk 2 is full"],
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draws_bar(where: type[io.StringIO]) -> str:
    sys.stderr = screen = where()
    log = RankLog()
    log.progress("epoch 2", 11, 22)
    log.progress("epoch 2", 22, 22)
    return screen.getvalue()


def test_bar_is_drawn_by_rank_0_in_a_terminal_and_erased_when_full() -> None:
    bar = "\rrank 0/2  epoch 2 [##########··········] 11/22"
    assert on_ranks(draws_bar, 2, Terminal) == [f"{bar}\r\x1b[K", ""]
    assert on_ranks(draws_bar, 2, io.StringIO) == ["", ""]


# --- Trainer -------------------------------------------------------------------------------------

GLOBAL_BATCH, NUM_EPOCHS, SEED = 24, 3, 2
TRAIN, TEST = images(80, seed=11), images(31, seed=12)  # 3 batches and 8 samples left out
Fits = dict[str, tuple[list[EpochResult], State, list[int]]]


def fits(
    build: Callable[[int], nn.Module],
    names: tuple[str, ...] = tuple(ALL_REDUCES),
    group: Group = None,
) -> Fits:
    """History, final state and all-reduces, by strategy; every rank starts with other weights."""
    results = {}
    for name in names:
        model, (all_reduce, calls) = build(dist.get_rank(group)).eval(), counting(name)
        trainer = Trainer(model, momentum(model), all_reduce=all_reduce, group=group)
        history = trainer.fit(
            Watched(TRAIN),
            Watched(TEST),
            epochs=NUM_EPOCHS,
            global_batch_size=GLOBAL_BATCH,
            seed=SEED,
        )
        results[name] = history, state_of(model), calls
    return results


@cache
def fitted_alone() -> tuple[list[tuple[list[float], Evaluation]], State]:
    """Step losses and evaluation of every epoch, and the final state."""
    model = classifier(0)
    optimizer, history = momentum(model), []
    for epoch in range(NUM_EPOCHS):
        order = torch.tensor(shard_indices(len(TRAIN[0]), 0, 1, epoch=epoch, seed=SEED))
        losses = [
            step_alone(model.train(), optimizer, (TRAIN[0][batch], TRAIN[1][batch]))
            for batch in order.split(GLOBAL_BATCH)[:-1]
        ]
        history.append((losses, evaluated_alone(model, TEST)))
    return history, state_of(model)


def check_fitted(by_rank: list[Fits], name: str) -> None:
    expected_history, expected_state = fitted_alone()
    for results in by_rank:
        history, state, calls = results[name]
        assert calls == NUM_EPOCHS * 3 * [2, 8 * 6, 8, 3 * 8, 3], "the trainer's own all-reduce"
        assert_close(state, expected_state, 1e-9)
        assert [result.epoch for result in history] == [1, 2, 3]
        for result, (losses, test) in zip(history, expected_history, strict=True):
            assert result.step_losses == pytest.approx(losses, abs=1e-9)
            assert result.train_loss == pytest.approx(sum(losses) / 3, abs=1e-9)
            assert result.test_loss == pytest.approx(test.loss, abs=1e-9)
            assert result.test_accuracy == test.accuracy
            assert result.images_per_s > 0


@cache
def fitted(world_size: int) -> list[Fits]:
    return on_ranks(fits, world_size, classifier)


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_history_and_weights_do_not_depend_on_the_number_of_ranks(
    world_size: int, name: str
) -> None:
    check_fitted(fitted(world_size), name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_batch_norm_is_evaluated_with_the_same_statistics_on_all_ranks(world_size: int) -> None:
    args = (normalising_model, ("native",))
    by_rank = [results["native"] for results in on_ranks(fits, world_size, *args)]
    for history, state, _ in by_rank:
        assert_close(state, by_rank[0][1], 0.0)
        assert state["1.num_batches_tracked"] == NUM_EPOCHS * 3, "fit must train in training mode"
        model = normalising_model()
        model.load_state_dict(state)
        test = evaluated_alone(model, TEST)
        assert history[-1].test_loss == pytest.approx(test.loss, abs=1e-12)
        assert history[-1].test_accuracy == pytest.approx(test.accuracy, abs=1e-12)


@pytest.mark.usefixtures("capsys")  # never a terminal, so that no bar is between the lines
def test_rank_0_alone_logs_one_line_an_epoch(tmp_path: Path) -> None:
    on_ranks(fits, 2, classifier, ("native",), output_dir=tmp_path)
    lines, of_rank_1 = lines_of(tmp_path, 2)
    assert of_rank_1 == []
    assert len(lines) == NUM_EPOCHS
    for epoch, line in enumerate(lines, start=1):
        losses = r"loss \d\.\d{4}  test loss \d\.\d{4}  accuracy \d+\.\d ?%"
        assert re.fullmatch(rf"rank 0/2  epoch {epoch}  {losses}  [\d,]+ images/s", line), line


def fits_what_cannot_be_shared() -> str:
    model = classifier()
    trainer = Trainer(model, momentum(model))
    data = Watched(TRAIN)
    return refusal(lambda: trainer.fit(data, data, epochs=1, global_batch_size=25))


def test_global_batch_that_cannot_be_shared_stops_the_training_before_it_starts() -> None:
    for text in on_ranks(fits_what_cannot_be_shared, 4):
        assert "cannot be shared equally by 4 ranks: use 24 or 28" in text


# --- groups --------------------------------------------------------------------------------------


def fits_naive(group: Group = None) -> Fits:
    return fits(classifier, ("naive",), group)


def does_everything(group: Group = None) -> list[object]:
    return [call(group=group) for call in (broadcasts, averages, evaluates, fits_naive)]


def test_everything_works_inside_a_group_and_needs_nobody_outside_it() -> None:
    broadcast, averaged, evaluated, fitted = zip(*on_members(does_everything), strict=True)
    check_broadcast(list(broadcast))
    check_averages(list(averaged))
    check_evaluated(list(evaluated))
    check_fitted(list(fitted), "naive")
