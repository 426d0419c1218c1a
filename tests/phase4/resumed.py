"""Bodies for task 4.2: a small training with parts of all kinds, which is interrupted."""

import hashlib
import io
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import int_list, refusal_of, returned, typed
from judging.tensors import given_group

AHEAD = 2  # number of batches that are asked for before they are trained on
PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "sampler")
GENERATORS = ("random", "NumPy", "torch")
Prints = dict[str, str]  # fingerprints of parts and generators


class Plan(NamedTuple):
    """Size of the dataset and of the batches, and the seed of the sampler."""

    num_samples: int = 7
    global_batch: int = 4
    seed: int = 5


class Scaler:
    """Doubles the scale of the loss after every third step."""

    def __init__(self) -> None:
        self.scale, self.good_steps = 8.0, 0

    def update(self) -> None:
        self.good_steps += 1
        if self.good_steps == 3:
            self.scale, self.good_steps = 2 * self.scale, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = state["scale"], state["good_steps"]


class Ema:
    """A moving average of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.mean = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model: nn.Module) -> None:
        self.count += 1
        for name, value in model.state_dict().items():
            self.mean[name].lerp_(value, 1 / min(self.count, 4))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean = state["count"], dict(state["mean"])


class Training:
    """A run with noise of ``random`` and NumPy in its data, with dropout, and with all parts."""

    def __init__(self, lesson: Any, plan: Plan, salt: int, group: Any = None) -> None:
        """Make all objects new.

        Args:
            lesson: Lesson of the learner.
            plan: Plan of the run.
            salt: Summand of all seeds, so that everything that is not restored is different.
            group: Ranks that train.
        """
        self.plan, self.group, self.rank = plan, group, dist.get_rank(group)
        torch.manual_seed(salt)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Linear(5, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler, self.ema = Scaler(), Ema(self.model)
        self.sampler = sampler_of(lesson, plan, group, seed=plan.seed + salt)
        self.parts = {name: getattr(self, name) for name in PARTS}
        self.state = state_of(lesson, self.parts, group)
        self.batches: list[list[int]] = []
        seed_generators(100 * salt + self.rank)

    def go_on(self, num_steps: int) -> None:
        """Train for ``num_steps``, with batches that were asked for ahead."""
        left = num_steps
        while left > 0:
            batches = ahead(self.sampler)
            for batch in batches:
                self._step(batch)
                self.sampler.advance()
                left -= 1
                if left == 0:
                    return

    def _step(self, batch: list[int]) -> None:
        self.batches.append(batch)
        x = torch.tensor(batch, dtype=torch.float32)[:, None] / torch.tensor([3.0, 5.0, 7.0])
        x = x.sin() + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.randn())
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().sum() / self.plan.global_batch
        (loss * self.scaler.scale).backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= self.scaler.scale
        self.optimizer.step()
        self.scheduler.step()
        self.scaler.update()
        self.ema.update(self.model)

    def prints(self) -> Prints:
        """Return fingerprints of all parts and of this rank's generators."""
        return {name: fingerprint(part.state_dict()) for name, part in self.parts.items()} | {
            "random": fingerprint(random.getstate()),
            "NumPy": fingerprint([*map(str, np.random.get_state()[1:])]),
            "torch": fingerprint(torch.get_rng_state()),
        }


def sampler_of(lesson: Any, plan: Plan, group: Any, **options: Any) -> Any:
    """Make a sampler as a caller would: without a group where all ranks take part."""
    options = {"seed": plan.seed, **options, **given_group(group)}
    return lesson.ResumableSampler(plan.num_samples, plan.global_batch, **options)


def state_of(lesson: Any, parts: Mapping[str, Any], group: Any) -> Any:
    """Make the learner's state of a run."""
    return lesson.TrainingState(parts, **given_group(group))


def seed_generators(seed: int) -> None:
    """Seed all generators of this rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ahead(sampler: Any) -> Iterator[list[int]]:
    """Ask for batches before they are trained on, as a DataLoader does."""
    found: list[list[int]] = []
    for count, batch in enumerate(sampler):
        found.append(int_list("ResumableSampler.__iter__", batch))
        if count >= AHEAD:
            yield found.pop(0)
    if not found:
        raise WrongResult(
            "the sampler has no batch left, and no epoch has begun: after the last batch of an "
            "epoch, advance() begins the next one at position 0"
        )
    yield from found


def plain(part: Any) -> Any:
    """Return a state as plain values that can be compared, bit for bit."""
    if isinstance(part, Tensor):
        values = part.detach().contiguous().reshape(-1)
        return [str(part.dtype), [*part.shape], values.view(torch.uint8).numpy().tobytes().hex()]
    if isinstance(part, Mapping):
        return [[str(key), plain(part[key])] for key in sorted(part, key=str)]
    if isinstance(part, list | tuple):
        return [plain(value) for value in part]
    return part


def fingerprint(part: Any) -> str:
    """Return a few digits that change with any bit."""
    return hashlib.sha256(repr(plain(part)).encode()).hexdigest()[:12]


def written(state: Any, group: Any = None) -> Any:
    """Write the state of rank 0 and read it on all ranks, as a checkpoint is."""
    content = [b""]
    if dist.get_rank(group) == 0:
        file = io.BytesIO()
        torch.save(state, file)
        content = [file.getvalue()]
    dist.broadcast_object_list(content, group=group, group_src=0)
    try:
        return torch.load(io.BytesIO(content[0]), weights_only=True)
    except pickle.UnpicklingError as error:
        raise WrongResult(
            "torch.load(…, weights_only=True) should read what TrainingState.state_dict returns: "
            "tensors, numbers, strings, and dicts, lists and tuples of them. NumPy's state holds "
            f"an array. {' '.join(str(error).split())[:300]}"
        ) from None


def state_dict(training: Training) -> dict[str, Any]:
    """Return the state of a run."""
    return typed("TrainingState.state_dict", training.state.state_dict(), dict)


def resumed(lesson: Any, plan: Plan, salt: int, state: Any, group: Any = None) -> Training:
    """Load a state into objects that are all new."""
    training = Training(lesson, plan, salt, group)
    training.state.load_state_dict(state)
    return training


def interrupt(lesson: Any, plan: Plan, stops: Sequence[int], group: Any = None) -> dict[str, Any]:
    """Train without a stop, and again with new objects after some of the steps.

    Returns:
        The prints and the samples after each step without a stop; those of the interrupted run,
        each with its step and the last thing that was done; and fingerprints of the states.
    """
    straight = Training(lesson, plan, 1, group)
    right = [straight.prints()]
    for _ in range(stops[-1]):
        straight.go_on(1)
        right.append(straight.prints())
    training, prints, states, batches = Training(lesson, plan, 1, group), [], [], []
    for start, stop in pairwise((0, *stops)):
        state = written(saved := state_dict(training), group)
        states.append(fingerprint(saved))
        prints.append((start, "saved", training.prints()))
        training = resumed(lesson, plan, 2 + start, state, group)
        prints.append((start, "loaded", training.prints()))
        training.go_on(stop - start)
        prints.append((stop, "trained", training.prints()))
        batches += training.batches
    found = {"right": right, "prints": prints, "states": states}
    return {**found, "batches": straight.batches, "resumed batches": batches}


def sample(lesson: Any, plan: Plan, num_epochs: int, group: Any = None) -> dict[str, Any]:
    """Go through some epochs; the generators of each rank are in another state."""
    seed_generators(17 + dist.get_rank(group))
    before = _generators()
    sampler, epochs, lengths = sampler_of(lesson, plan, group), [], []
    for _ in range(num_epochs):
        epoch = []
        for batch in sampler:
            lengths.append(len(sampler))
            epoch.append(int_list("ResumableSampler.__iter__", batch))
            sampler.advance()
        epochs.append(epoch)
    undisturbed, state = _generators() == before, sampler.state_dict()
    place = [state["epoch"], state["position"]]
    return {"epochs": epochs, "lengths": lengths, "undisturbed": undisturbed, "place": place}


def _generators() -> list[str]:
    states = random.getstate(), [*map(str, np.random.get_state()[1:])], torch.get_rng_state()
    return [fingerprint(state) for state in states]


def look_ahead(lesson: Any, plan: Plan, taken: int, trained: int) -> dict[str, Any]:
    """Ask for more batches than are trained on; return what is saved, and what is left."""
    sampler = sampler_of(lesson, plan, None)
    whole, batches = [*sampler], iter(sampler)
    for _ in range(taken):
        next(batches)
    for _ in range(trained):
        sampler.advance()
    state = returned("ResumableSampler.state_dict", sampler.state_dict())
    names = ("epoch", "position", "seed", "num_samples")
    found = {"state": {name: state.get(name) for name in names}, "rest": [*batches]}
    before = fingerprint(state)
    other = sampler_of(lesson, plan, None, seed=plan.seed + 1)
    wider = sampler_of(lesson, plan._replace(global_batch=plan.global_batch + 3), None)
    for loader in (other, wider):
        loader.load_state_dict(state)
    found |= {"left": [*other], "wider": [*wider], "length": len(other)}
    return {**found, "whole": whole, "unchanged": fingerprint(state) == before}


def other_samples(lesson: Any, plan: Plan) -> dict[str, Any]:
    """Load the state of a sampler of another dataset."""
    sampler = sampler_of(lesson, plan, None)
    sampler.advance()
    other = sampler_of(lesson, plan._replace(num_samples=plan.num_samples + 6), None)
    return refusal_of(lambda: other.load_state_dict(sampler.state_dict()))


def other_ranks(lesson: Any, plan: Plan, before: int, after: int, stop: int) -> dict[str, Any]:
    """Save on ``before`` ranks after some steps of the first epoch, load on ``after`` of them."""
    rank, found = dist.get_rank(), {}
    savers, loaders = dist.new_group([*range(before)]), dist.new_group([*range(after)])
    state = None
    if rank < before:
        first = Training(lesson, plan, 1, savers)
        first.go_on(stop)
        found = {"before": first.batches, "saved": first.prints()}
        state = state_dict(first)
    state = written(state)
    if rank < after:
        for salt, name in ((2, "draws"), (3, "draws again")):
            training = resumed(lesson, plan, salt, state, loaders)
            found["loaded"] = training.prints()
            found[name] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        training.go_on(-(-plan.num_samples // plan.global_batch) - stop)
        found["after"] = training.batches
    return found


def load_again(lesson: Any, plan: Plan) -> dict[str, Any]:
    """Load a state, train, and load the same state again."""
    first = Training(lesson, plan, 1)
    first.go_on(2)
    right, state = first.prints(), written(state_dict(first))
    before = fingerprint(state)
    training = resumed(lesson, plan, 2, state)
    loaded = fingerprint(state)
    training.go_on(3)
    trained = fingerprint(state)
    training.state.load_state_dict(state)
    changed = [loaded != before, trained != before]
    return {"changed": changed, "right": right, "again": training.prints()}


def load_other_parts(lesson: Any, plan: Plan, is_saved: bool) -> list[dict[str, Any]]:
    """Load states with one part too many, or one too few: each part in its turn."""
    return [_load_other_parts(lesson, plan, name, is_saved) for name in PARTS]


def _load_other_parts(lesson: Any, plan: Plan, name: str, is_saved: bool) -> dict[str, Any]:
    training, other = Training(lesson, plan, 1), Training(lesson, plan, 2)
    other.go_on(1)
    incomplete = training if not is_saved else other
    rest = {key: part for key, part in incomplete.parts.items() if key != name}
    saver = training.state if is_saved else state_of(lesson, rest, None)
    loader = state_of(lesson, rest, None) if is_saved else other.state
    state, before = saver.state_dict(), other.prints()
    refusal = refusal_of(lambda: loader.load_state_dict(state))
    changed = [key for key, value in other.prints().items() if value != before[key]]
    return {"refusal": refusal, "changed": changed}


class Drawing:
    """A part that draws random numbers while it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None:
        random.gauss(0.0, 1.0)
        np.random.randn()
        torch.rand(3)


def load_what_draws(lesson: Any) -> list[bool]:
    """Return whether each generator is as it was saved, after parts have drawn."""
    parts = {"first": Drawing(), "last": Drawing()}
    seed_generators(3 + dist.get_rank())
    state, saved = state_of(lesson, parts, None).state_dict(), _generators()
    seed_generators(30)
    state_of(lesson, parts, None).load_state_dict(state)
    return [now == was for now, was in zip(_generators(), saved, strict=True)]


def save_large(lesson: Any) -> None:
    """Save and load a large part."""
    training = state_of(lesson, {"model": nn.Linear(1000, 100)}, None)  # 400 kB
    training.load_state_dict(training.state_dict())


class PretendedCuda:
    """A generator in the place of a GPU's, reached by torch.cuda's functions."""

    def __init__(self) -> None:
        self.state = torch.arange(16, dtype=torch.uint8)
        self.is_there = True

    def install(self) -> None:
        """Replace the functions."""
        functions = {
            "is_available": lambda: self.is_there,
            "is_initialized": lambda: self.is_there,
            "device_count": lambda: int(self.is_there),
            "current_device": lambda: 0,
            "get_rng_state": lambda *_, **__: self.state.clone(),
            "get_rng_state_all": lambda: [self.state.clone()],
            "set_rng_state": lambda state, *_, **__: self._set(state),
            "set_rng_state_all": lambda states: self._set(*states),
        }
        for name, function in functions.items():
            setattr(torch.cuda, name, function)

    def _set(self, state: Tensor) -> None:
        if not self.is_there:
            raise RuntimeError("No CUDA GPUs are available")
        self.state = state.clone()


def with_cuda(lesson: Any) -> tuple[bool, str]:
    """Save where there is a GPU; load there, and where there is none.

    Returns:
        Whether the GPU's generator is restored, and the error where there is none.
    """
    cuda = PretendedCuda()
    cuda.install()
    training = state_of(lesson, {}, None)
    saved, before = written(training.state_dict()), cuda.state
    cuda.state = 255 - before
    training.load_state_dict(saved)
    is_restored = torch.equal(cuda.state, before)
    cuda.is_there = False
    seed_generators(4)
    try:
        training.load_state_dict(saved)
    except RuntimeError as error:
        return is_restored, str(error)
    return is_restored, ""
