"""Bodies for task 4.2: a small training of all kinds of parts, which is interrupted."""

import hashlib
import io
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grade import WrongResult
from judging.calls import int_list, refusal_of, returned, typed

AHEAD = 2  # batches that are asked for before they are trained on
PARTS = ("model", "optimizer", "scheduler", "scaler", "ema", "sampler")
GENERATORS = ("random", "NumPy", "torch")
Prints = dict[str, str]  # of parts and generators


class Plan(NamedTuple):
    """What is trained, and for how long."""

    num_samples: int = 7
    global_batch: int = 4
    num_steps: int = 5  # two epochs and a step
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
    """A mean of the parameters of all steps, in which early ones count less and less."""

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
    """A run: data with noise of ``random`` and NumPy, dropout, and all parts."""

    def __init__(self, lesson: Any, plan: Plan, salt: int, group: Any = None) -> None:
        """Make all objects new.

        Args:
            lesson: the learner's.
            plan: of the run.
            salt: of all seeds, so that what is not restored is different.
            group: of the ranks that train.
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
        """Train for so many steps, with batches that were asked for ahead."""
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
        """Fingerprints of all parts and of this rank's generators."""
        return {name: fingerprint(part.state_dict()) for name, part in self.parts.items()} | {
            "random": fingerprint(random.getstate()),
            "NumPy": fingerprint([*map(str, np.random.get_state()[1:])]),
            "torch": fingerprint(torch.get_rng_state()),
        }


def sampler_of(lesson: Any, plan: Plan, group: Any, **options: Any) -> Any:
    """Make a sampler as a caller would: without a group where all ranks take part."""
    options = {"seed": plan.seed, **options} | ({"group": group} if group else {})
    return lesson.ResumableSampler(plan.num_samples, plan.global_batch, **options)


def state_of(lesson: Any, parts: Mapping[str, Any], group: Any) -> Any:
    """Make the learner's state of a run."""
    return lesson.TrainingState(parts, **({"group": group} if group else {}))


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
    """Write a state as what can be compared, all bits included."""
    if isinstance(part, Tensor):
        values = part.detach().contiguous().reshape(-1)
        return [str(part.dtype), [*part.shape], values.view(torch.uint8).numpy().tobytes().hex()]
    if isinstance(part, Mapping):
        return [[str(key), plain(part[key])] for key in sorted(part, key=str)]
    if isinstance(part, list | tuple):
        return [plain(value) for value in part]
    return part


def fingerprint(part: Any) -> str:
    """Return a few digits that are other ones if any bit is."""
    return hashlib.sha256(repr(plain(part)).encode()).hexdigest()[:12]


def written(state: Any, group: Any = None) -> Any:
    """Write the state of rank 0, and read it on all ranks: as a checkpoint is."""
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


def interrupt_everywhere(lesson: Any, plan: Plan, group: Any = None) -> dict[str, Any]:
    """Train without a stop, then stop after each step and go on with new objects."""
    straight = Training(lesson, plan, 1, group)
    right = [straight.prints()]
    for _ in range(plan.num_steps):
        straight.go_on(1)
        right.append(straight.prints())
    saving, states, same = Training(lesson, plan, 1, group), [], []
    while True:
        states.append(written(state := state_dict(saving), group))
        same.append(fingerprint(state))
        if len(states) > plan.num_steps:
            break
        saving.go_on(1)
    found = {"right": right, "saving": saving.prints(), "states": same, "once": [], "twice": []}
    found["batches"] = straight.batches
    for step, state in enumerate(states[:-1]):
        found["once"].append(_once(lesson, plan, step, state, group))
        found["twice"].append(_twice(lesson, plan, step, state, group))
    return found


def _once(lesson: Any, plan: Plan, step: int, state: Any, group: Any) -> dict[str, Any]:
    training = resumed(lesson, plan, 2 + step, state, group)
    loaded = training.prints()
    training.go_on(plan.num_steps - step)
    return {"loaded": loaded, "end": training.prints(), "batches": training.batches}


def _twice(lesson: Any, plan: Plan, step: int, state: Any, group: Any) -> Prints:
    first = resumed(lesson, plan, 20 + step, state, group)
    first.go_on(1)
    again = written(state_dict(first), group)
    second = resumed(lesson, plan, 40 + step, again, group)
    second.go_on(plan.num_steps - step - 1)
    return second.prints()


def sample(lesson: Any, plan: Plan, num_epochs: int, group: Any = None) -> dict[str, Any]:
    """Go through some epochs; each rank's generators are in another state."""
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
    """Ask for more batches than are trained on; say what is saved, and what is left."""
    sampler = sampler_of(lesson, plan, None)
    whole = [*sampler]
    batches = iter(sampler)
    for _ in range(taken):
        next(batches)
    for _ in range(trained):
        sampler.advance()
    state = returned("ResumableSampler.state_dict", sampler.state_dict())
    rest = [*batches]
    before = fingerprint(state)
    other = sampler_of(lesson, plan, None, seed=plan.seed + 1)
    other.load_state_dict(state)
    wider = sampler_of(lesson, plan._replace(global_batch=plan.global_batch + 3), None)
    wider.load_state_dict(state)
    names = ("epoch", "position", "seed", "num_samples")
    return {
        "state": {name: state.get(name) for name in names},
        "whole": whole,
        "rest": rest,
        "left": [*other],
        "wider": [*wider],
        "unchanged": fingerprint(state) == before,
        "length": len(other),
    }


def other_samples(lesson: Any, plan: Plan) -> dict[str, Any]:
    """Load the sampler's state of another dataset."""
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
        num_left = -(-plan.num_samples // plan.global_batch) - stop
        for salt, name in ((2, "draws"), (3, "draws again")):
            training = resumed(lesson, plan, salt, state, loaders)
            found |= {"loaded": training.prints()}
            found |= {name: [random.random(), float(np.random.rand()), float(torch.rand(()))]}
        training.go_on(num_left)
        found |= {"after": training.batches}
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
    training.state.load_state_dict(state)
    return {
        "by loading": loaded != before,
        "by training": fingerprint(state) != before,
        "right": right,
        "again": training.prints(),
    }


def load_other_parts(lesson: Any, plan: Plan, is_saved: bool) -> list[dict[str, Any]]:
    """Load states that have a part too many, or one too few: each part in its turn."""
    return [_load_other_parts(lesson, plan, name, is_saved) for name in PARTS]


def _load_other_parts(lesson: Any, plan: Plan, name: str, is_saved: bool) -> dict[str, Any]:
    training, other = Training(lesson, plan, 1), Training(lesson, plan, 2)
    other.go_on(1)
    fewer = {key: part for key, part in training.parts.items() if key != name}
    saver = training.state if is_saved else state_of(lesson, fewer, None)
    rest = {key: part for key, part in other.parts.items() if key != name}
    loader = state_of(lesson, rest, None) if is_saved else other.state
    state, before = saver.state_dict(), other.prints()
    refusal = refusal_of(lambda: loader.load_state_dict(state))
    changed = [key for key, value in other.prints().items() if value != before[key]]
    return {"refusal": refusal, "changed": changed}


class Drawing:
    """A part that draws while it is loaded, as one that makes new weights first does."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None:
        random.gauss(0.0, 1.0)
        np.random.randn()
        torch.rand(3)


def load_what_draws(lesson: Any) -> list[bool]:
    """Return whether each generator is as it was saved, after a part has drawn."""
    parts = {"first": Drawing(), "last": Drawing()}
    seed_generators(3 + dist.get_rank())
    state, saved = state_of(lesson, parts, None).state_dict(), _generators()
    seed_generators(30)
    state_of(lesson, parts, None).load_state_dict(state)
    return [now == was for now, was in zip(_generators(), saved, strict=True)]


class Large:
    """A part of 400 kB."""

    def __init__(self) -> None:
        self.values = torch.ones(100_000)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state["values"]


def save_large(lesson: Any) -> None:
    """Save and load; what travels is counted."""
    training = state_of(lesson, {"model": Large()}, None)
    training.load_state_dict(training.state_dict())


class PretendedCuda:
    """Stands for the generator of a GPU, in the place of torch.cuda's functions."""

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


def with_cuda(lesson: Any) -> dict[str, bool]:
    """Save where there is a GPU; load there, and where there is none."""
    cuda = PretendedCuda()
    cuda.install()
    training = state_of(lesson, {}, None)
    saved, before = written(training.state_dict()), cuda.state
    cuda.state = 255 - before
    training.load_state_dict(saved)
    found = {"restored": torch.equal(cuda.state, before)}
    cuda.is_there = False
    seed_generators(4)
    error = ""
    try:
        training.load_state_dict(saved)
    except RuntimeError as raised:
        error = str(raised)
    return {**found, "error": error}  # type: ignore[dict-item]
