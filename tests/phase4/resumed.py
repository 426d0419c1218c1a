"""Bodies (functions that ranks run) for task 4.2: a training run that is interrupted."""

import hashlib
import io
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from distlab.grade import WrongResult
from judging.calls import int_list, refusal_of, returned, typed
from judging.tensors import given_group
from phase4.states import plain

AHEAD = 2  # number of batches that are requested ahead of training
PARTS = ("model", "optimizer", "scheduler", "ema", "sampler", "drawing")
GENERATORS = ("random", "NumPy", "torch")
Prints = dict[str, str]  # fingerprints of parts and generators


class Plan(NamedTuple):
    """The size of the dataset and of the batches, and the seed of the sampler."""

    num_samples: int = 7
    global_batch: int = 4
    seed: int = 5


class Drawing:
    """A part that draws random numbers when it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: object) -> None:
        random.gauss(0.0, 1.0)
        np.random.randn()
        torch.rand(3)


class Training:
    """A run with all parts, with noise from ``random`` and NumPy in its data, and with dropout."""

    def __init__(self, lesson: Any, plan: Plan, salt: int, group: Any = None) -> None:
        """Make all objects from scratch.

        ``salt`` is added to all seeds, so that everything that is not restored differs.
        """
        self.plan, self.group, self.rank = plan, group, dist.get_rank(group)
        torch.manual_seed(salt)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.4), nn.Linear(5, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.ema, self.drawing = AveragedModel(self.model), Drawing()
        self.sampler = sampler_of(lesson, plan, group, seed=plan.seed + salt)
        self.parts = {name: getattr(self, name) for name in PARTS}
        self.state = state_of(lesson, self.parts, group)
        self.batches: list[list[int]] = []
        seed_generators(100 * salt + self.rank)

    def go_on(self, num_steps: int) -> None:
        """Train for ``num_steps``, with batches that are requested ahead."""
        batches = chain.from_iterable(ahead(self.sampler) for _ in count())
        for batch in islice(batches, num_steps):
            self._step(batch)
            self.sampler.advance()

    def _step(self, batch: list[int]) -> None:
        self.batches.append(batch)
        x = torch.tensor(batch, dtype=torch.float32)[:, None] / torch.tensor([3.0, 5.0, 7.0])
        x = x.sin() + 0.1 * random.gauss(0.0, 1.0) + 0.1 * float(np.random.randn())
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().sum() / self.plan.global_batch
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""
        return typed("TrainingState.state_dict", self.state.state_dict(), dict)

    def prints(self) -> Prints:
        """Return fingerprints of all parts and of this rank's generators."""
        parts = {name: fingerprint(part.state_dict()) for name, part in self.parts.items()}
        return parts | prints_of_generators()


def sampler_of(lesson: Any, plan: Plan, group: Any, **options: Any) -> Any:
    """Make a sampler as a caller would, without a group if all ranks take part."""
    options = {"seed": plan.seed, **options, **given_group(group)}
    return lesson.ResumableSampler(plan.num_samples, plan.global_batch, **options)


def state_of(lesson: Any, parts: Mapping[str, Any], group: Any) -> Any:
    """Make the learner's object for the state of a run."""
    return lesson.TrainingState(parts, **given_group(group))


def prints_of_generators() -> Prints:
    """Return fingerprints of this rank's generators."""
    states = random.getstate(), [*map(str, np.random.get_state()[1:])], torch.get_rng_state()
    return dict(zip(GENERATORS, map(fingerprint, states), strict=True))


def seed_generators(seed: int) -> None:
    """Seed all generators of this rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ahead(sampler: Any) -> Iterator[list[int]]:
    """Request batches ahead of training, as a DataLoader does."""
    waiting: list[list[int]] = []
    for number, batch in enumerate(sampler):
        waiting.append(int_list("ResumableSampler.__iter__", batch))
        if number >= AHEAD:
            yield waiting.pop(0)
    if not waiting:
        raise WrongResult(
            "the sampler has no batch left, and no epoch has begun: after the last batch of an "
            "epoch, advance() begins the next one at position 0"
        )
    yield from waiting


def fingerprint(part: Any) -> str:
    """Return a short hash that differs if any bit differs."""
    return hashlib.sha256(repr(plain(part)).encode()).hexdigest()[:12]


def written(state: Any, group: Any = None) -> Any:
    """Write rank 0's state and read it on all ranks, as with a checkpoint."""
    content = [b""]
    if dist.get_rank(group) == 0:
        file = io.BytesIO()
        torch.save(state, file)
        content = [file.getvalue()]
    dist.broadcast_object_list(content, group=group, group_src=0)
    try:
        return torch.load(io.BytesIO(content[0]), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WrongResult(
            "torch.load(…, weights_only=True) should read what TrainingState.state_dict returns: "
            "tensors, numbers, strings, and dicts, lists and tuples of them. NumPy's state holds "
            f"an array. {' '.join(str(error).split())[:300]}"
        ) from None


def resumed(lesson: Any, plan: Plan, salt: int, state: Any, group: Any = None) -> Training:
    """Return a new training run with a state loaded into it."""
    training = Training(lesson, plan, salt, group)
    training.state.load_state_dict(state)
    return training


def interrupt(lesson: Any, plan: Plan, stops: Sequence[int], group: Any = None) -> dict[str, Any]:
    """Train without a stop; then train again, with new objects after each step in ``stops``."""
    straight = Training(lesson, plan, 1, group)
    right = [straight.prints()]
    for _ in range(stops[-1]):
        straight.go_on(1)
        right.append(straight.prints())
    training, prints, states, batches = Training(lesson, plan, 1, group), [], [], []
    changed = set[str]()
    for start, stop in pairwise((0, *stops)):
        saved = training.state_dict()
        states.append(fingerprint(saved))
        before = fingerprint(state := written(saved, group))
        prints.append((start, "saved", training.prints()))
        training = resumed(lesson, plan, 2 + start, state, group)
        changed |= {"loading"} if fingerprint(state) != before else set()
        prints.append((start, "loaded", training.prints()))
        training.go_on(stop - start)
        changed |= {"training"} if fingerprint(state) != before else set()
        prints.append((stop, "trained", training.prints()))
        batches += training.batches
    facts = {"right": right, "prints": prints, "states": states, "changed": sorted(changed)}
    return {**facts, "batches": straight.batches, "resumed batches": batches}


def sample(lesson: Any, plan: Plan, num_epochs: int, group: Any = None) -> dict[str, Any]:
    """Iterate over some epochs, with each rank's generators in a different state."""
    seed_generators(17 + dist.get_rank(group))
    before = prints_of_generators()
    sampler, epochs, lengths = sampler_of(lesson, plan, group), [], []
    for _ in range(num_epochs):
        epoch = []
        for batch in sampler:
            lengths.append(len(sampler))
            epoch.append(int_list("ResumableSampler.__iter__", batch))
            sampler.advance()
        epochs.append(epoch)
    undisturbed, state = prints_of_generators() == before, sampler.state_dict()
    place = [state["epoch"], state["position"]]
    return {"epochs": epochs, "lengths": lengths, "undisturbed": undisturbed, "place": place}


def look_ahead(lesson: Any, plan: Plan, taken: int, trained: int) -> dict[str, Any]:
    """Request more or fewer batches than are trained on; return the state and further batches."""
    sampler = sampler_of(lesson, plan, None)
    whole, batches = [*sampler], iter(sampler)
    for _ in range(taken):
        next(batches)
    for _ in range(trained):
        sampler.advance()
    state = returned("ResumableSampler.state_dict", sampler.state_dict())
    names = ("epoch", "position", "seed", "num_samples")
    facts = {"state": {name: state.get(name) for name in names}, "rest": [*batches]}
    before = fingerprint(state)
    other = sampler_of(lesson, plan, None, seed=plan.seed + 1)
    wider = sampler_of(lesson, plan._replace(global_batch=plan.global_batch + 3), None)
    for loader in (other, wider):
        loader.load_state_dict(state)
    facts |= {"left": [*other], "wider": [*wider], "length": len(other)}
    longer = sampler_of(lesson, plan._replace(num_samples=plan.num_samples + 6), None)
    refusal = refusal_of(lambda: longer.load_state_dict(state))
    is_unchanged = fingerprint(state) == before
    return {**facts, "whole": whole, "unchanged": is_unchanged, "refusal": refusal}


def other_ranks(lesson: Any, plan: Plan, before: int, after: int, stop: int) -> dict[str, Any]:
    """Save on ``before`` ranks after some steps of the first epoch, and load on ``after`` ranks."""
    rank, facts = dist.get_rank(), {}
    savers, loaders = dist.new_group([*range(before)]), dist.new_group([*range(after)])
    state = None
    if rank < before:
        first = Training(lesson, plan, 1, savers)
        first.go_on(stop)
        facts = {"before": first.batches, "saved": first.prints()}
        state = first.state_dict()
    state = written(state)
    if rank < after:
        for salt, name in ((2, "draws"), (3, "draws again")):
            training = resumed(lesson, plan, salt, state, loaders)
            facts["loaded"] = training.prints()
            facts[name] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        training.go_on(-(-plan.num_samples // plan.global_batch) - stop)
        facts["after"] = training.batches
    return facts


def load_other_parts(lesson: Any, plan: Plan, name: str, is_saved: bool) -> dict[str, Any]:
    """Load a state with one part too many or too few; return the error, and the changed parts."""
    here, there = Training(lesson, plan, 2), Training(lesson, plan, 1)
    here.go_on(1)
    incomplete = here if is_saved else there
    parts = {key: part for key, part in incomplete.parts.items() if key != name}
    incomplete.state = state_of(lesson, parts, None)
    state, before = there.state_dict(), here.prints()
    refusal = refusal_of(lambda: here.state.load_state_dict(state))
    changed = [key for key, value in here.prints().items() if value != before[key]]
    return {"refusal": refusal, "changed": changed}


def save_large(lesson: Any) -> None:
    """Save and load a large part."""
    training = state_of(lesson, {"model": nn.Linear(1000, 100)}, None)  # 400 kB of weights
    training.load_state_dict(training.state_dict())


def with_cuda(lesson: Any) -> tuple[bool, str]:
    """Load while torch.cuda pretends to have a GPU, and then while it has none.

    Returns:
        Whether the GPU's generator is restored, and the error without a GPU.
    """
    is_there, states = [True], [torch.arange(16, dtype=torch.uint8)]

    def set_state(state: Tensor, *_: object, **__: object) -> None:
        if not is_there[0]:
            raise RuntimeError("No CUDA GPUs are available")
        states[0] = state.clone()

    _pretend_cuda(is_there, states, set_state)
    training, before = state_of(lesson, {}, None), states[0]
    saved = written(training.state_dict())
    states[0] = 255 - before
    training.load_state_dict(saved)
    is_restored = torch.equal(states[0], before)
    is_there[0] = False
    try:
        training.load_state_dict(saved)
    except RuntimeError as error:
        return is_restored, str(error)
    return is_restored, ""


def _pretend_cuda(is_there: list[bool], states: list[Tensor], set_state: Any) -> None:
    """Replace the functions of torch.cuda through which a lesson may access a generator."""
    functions: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: is_there[0]),
        "device_count": lambda: int(is_there[0]),
        "current_device": lambda: 0,
        "get_rng_state": lambda *_, **__: states[0].clone(),
        "get_rng_state_all": lambda: [states[0].clone()],
        "set_rng_state": set_state,
        "set_rng_state_all": lambda states: set_state(*states),
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
