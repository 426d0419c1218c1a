"""``distlab sim --against one``: which tensor is the first that differs from a run on one rank?

The program runs on one rank, where ``Reference`` keeps what its optimizers see, and then on all
ranks, where ``Against`` compares:

    step 1   parameters   gradients        the first difference says where to look:
    step 2   parameters   gradients        a parameter in step 1: the initialisation
    …                                      a gradient: loss, data or average of the step
                                           a parameter of a later step: the step before it

Rounding makes equal programs differ, too. A gradient that is zero but for rounding, such as that of
a key's bias in attention, is measured by the norm of all gradients. Adam turns such rounding into
whole steps, which change nothing but the parameter, so a parameter of a later step only counts if a
gradient of the same step differs.
"""

from collections import Counter
from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import Named, StepOf
from distlab.util.text import counted, rank_names

PARAMETER, GRADIENT = "", "the gradient of "
MAX_STEPS, MAX_BYTES = 20, 2**30  # of each optimizer, and of all steps, that are kept
MIN_COSINE = 1 - 1e-6  # above it, a tensor counts as a multiple of another
SMALL = (
    0.01  # fraction of the norm of all gradients below which a gradient is measured by that norm
)
WRAPPERS = {"module", "_orig_mod"}  # names under which a wrapper holds the model
_DEFAULT_TOLERANCE = 5e-2  # of 16 bits
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HINTS = {
    PARAMETER: "Do all ranks begin with the parameters of one rank?",
    GRADIENT: "Do the ranks train on the samples of one rank, without dropout, and without batch "
    "norms over a part of them? Then look at the loss and at the average.",
}


Key = tuple[str, str]  # kind of a tensor, and the name of its parameter
Tensors = dict[Key, Tensor]


class Reference:
    """Keeps parameters and gradients of one rank, before each of its first ``MAX_STEPS`` steps."""

    def __init__(self) -> None:
        self.steps: dict[StepOf, Tensors] = {}
        self.num_steps: Counter[int] = Counter()  # keys: optimizers
        self._num_bytes = 0

    def stepped(self, rank: int, at: StepOf, params: Named, site: Site) -> None:
        """Keep a step's tensors."""
        self.num_steps[at.optimizer] += 1
        if at.step < MAX_STEPS and self._num_bytes < MAX_BYTES:
            tensors = {key: tensor.detach().clone() for key, tensor in _tensors_of(params).items()}
            self.steps[at] = tensors
            self._num_bytes += sum(x.numel() * x.element_size() for x in tensors.values())


def _tensors_of(params: Named) -> Tensors:
    """Return the parameters, and then their gradients; of DTensors, this rank's part."""
    gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
    return {
        (kind, _without_wrappers(name)): getattr(tensor, "_local_tensor", tensor)
        for kind, tensors in ((PARAMETER, params), (GRADIENT, gradients))
        for name, tensor in tensors.items()
        if not tensor.is_meta
    }


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _shapes(tensors: Mapping[Key, Tensor]) -> dict[str, torch.Size]:
    return {name: t.shape for (kind, name), t in tensors.items() if kind == PARAMETER}


class _First(NamedTuple):
    """A difference.

    Attributes:
        order: Place of its step among those of one rank.
        number: Its place in the step.
        text: Text for the user.
        hint: Question that leads on, or "".
    """

    order: int
    number: int
    text: str
    hint: str


class Against:
    """Compares the steps of all ranks with a reference."""

    def __init__(self, reference: Reference, num_ranks: int) -> None:
        self._reference, self._num_ranks = reference, num_ranks
        self._order = {at: order for order, at in enumerate(reference.steps)}
        self._first: _First | None = None
        self._compared: set[StepOf] = set()
        self._left_out: Counter[int] = Counter()  # steps with other parameters, by rank
        self._num_steps: Counter[tuple[int, int]] = Counter()  # keys: ranks and optimizers

    @property
    def differs(self) -> bool:
        """True if anything differed, or if nothing could be compared."""
        return bool(self._first or self._other_numbers() or not self._compared)

    def stepped(self, rank: int, at: StepOf, params: Named, site: Site) -> None:
        """Compare a step's tensors, and remember the earliest difference of all ranks."""
        self._num_steps[rank, at.optimizer] += 1
        if at not in self._order:
            return
        expected, found = self._reference.steps[at], _tensors_of(params)
        if _shapes(expected) != _shapes(found) or not expected:
            self._left_out[rank] += 1
            return
        self._compared.add(at)
        differences = _differences(expected, found, at.step, self._num_ranks)
        for number, ((kind, name), difference) in enumerate(differences.items()):
            text = f"step {at.step + 1}: {kind}{name} on rank {rank} of {self._num_ranks}"
            hint = "" if difference.is_multiple else _HINTS[kind]
            first = _First(
                self._order[at], number, f"{text} {difference.text}; {place(site)}", hint
            )
            self._first = min(self._first or first, first)

    def lines(self) -> list[str]:
        """Return what was found, for the user."""
        found = self._numbers()
        if self._first:
            found = [text for text in (self._first.text, self._first.hint) if text]
        if self._left_out:
            steps = counted(self._left_out.total(), "step")
            of_ranks = f"{steps} of {rank_names(self._left_out)}"
            found.append(f"not compared: {of_ranks}, with other parameters than one rank")
        return found

    def _numbers(self) -> list[str]:
        """Return how many steps were compared, and which numbers of steps differ."""
        if not self._reference.num_steps:
            return ["nothing was compared: one rank took no step of a torch optimizer"]
        if not self._compared:
            steps = counted(self._reference.num_steps.total(), "step")
            return [f"nothing was compared: one rank took {steps}, with other parameters"]
        compared = f"{counted(len(self._compared), 'step')} compared"
        return [f"{compared}: all equal those of one rank", *self._other_numbers()]

    def _other_numbers(self) -> list[str]:
        """Return a line about the first rank that took another number of steps than one rank."""
        lines = [
            f"rank {rank} of {self._num_ranks} took {counted(number, 'step')}, and one rank "
            f"{self._reference.num_steps[optimizer]}"
            for (rank, optimizer), number in self._num_steps.items()
            if number != self._reference.num_steps[optimizer] and rank not in self._left_out
        ]
        return lines[:1]


class _Difference(NamedTuple):
    """How a tensor differs from that of one rank: a text; whether it is a multiple of that."""

    text: str
    is_multiple: bool = False


def _differences(
    expected: Tensors, found: Tensors, step: int, num_ranks: int
) -> dict[Key, _Difference]:
    """Return the tensors that differ from those of one rank, in order."""
    whole = _norm_of_gradients(expected)
    differences = dict[Key, _Difference]()
    for key in dict.fromkeys([*expected, *found]):
        least = whole * SMALL if key[0] == GRADIENT else 0.0
        tolerance = Tolerance(step + 1, least)
        difference = _difference(expected.get(key), found.get(key), tolerance, num_ranks)
        if difference:
            differences[key] = difference
    has_gradient = any(kind == GRADIENT for kind, _ in differences)
    return differences if has_gradient or step == 0 else {}


def _norm_of_gradients(tensors: Tensors) -> float:
    gradients = (_flat(x) for (kind, _), x in tensors.items() if kind == GRADIENT)
    return sqrt(sum(_norm(x) ** 2 for x in gradients))


def _norm(x: Tensor) -> float:
    """Return the norm of the numbers that are finite."""
    return float(x.masked_fill(~x.isfinite(), 0.0).norm())


class Tolerance(NamedTuple):
    """What rounding may do: relative to a tensor's norm, or to ``least`` if that is more."""

    growth: int  # number of steps in which rounding has added up
    least: float


def _difference(
    one: Tensor | None, other: Tensor | None, tolerance: Tolerance, num_ranks: int
) -> _Difference | None:
    """Return how a tensor differs from that of one rank; None if it does not."""
    if other is None:
        return _Difference("is missing, and is there on one rank")
    if one is None:
        return _Difference("is there, and is missing on one rank")
    a, b = _flat(one), _flat(other)
    same = (a == b) | (a.isnan() & b.isnan())
    norm, distance = _norm(a), float((a - b).masked_fill(same, 0.0).norm())
    share = _TOLERANCES.get(one.dtype, _DEFAULT_TOLERANCE) * tolerance.growth
    if distance <= share * max(norm, tolerance.least):
        return None
    norm_of_other = _norm(b)
    if norm * norm_of_other and float(a @ b) >= MIN_COSINE * norm * norm_of_other:
        factor, reason = norm_of_other / norm, _reason(norm_of_other / norm, num_ranks)
        if reason or len(a) > 1:
            text = f"is {factor:.4g} times that on one rank{reason}"
            return _Difference(text, is_multiple=True)
    far = f"{distance / norm:.2g} times its norm away, " if norm else ""
    text = f"differs from that on one rank ({far}norm {norm_of_other:.4g}, there {norm:.4g})"
    return _Difference(text)


def _flat(x: Tensor) -> Tensor:
    """Return a tensor's numbers, float64 (numel,)."""
    dense = x.detach().to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double().flatten()


def _reason(factor: float, num_ranks: int) -> str:
    """Say how a factor may have come about; "" if that is unknown."""
    reasons = {
        num_ranks: ", as if summed over the ranks and not divided",
        1 / num_ranks: ", as if divided by the number of ranks and not summed, or twice",
    }
    return next((text for f, text in reasons.items() if abs(factor / f - 1) < 1e-3), "")
