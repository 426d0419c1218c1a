"""``distlab sim --against one``: which tensor is the first that differs from a run on one rank?

The program runs on one rank, where ``Reference`` keeps what its optimizers see, and then on all
ranks, where ``Against`` compares:

    step 1   parameters   gradients        the first difference says where to look:
    step 2   parameters   gradients        a parameter in step 1: the initialisation
    …                                      a gradient: loss, data or average of the step
                                           a parameter of a later step: the step before it
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import Site
from distlab.sim.results.simulated import Named, StepOf
from distlab.util.text import counted, rank_names

PARAMETER, GRADIENT = "", "the gradient of "
MAX_STEPS = 20  # of each optimizer that are kept
MIN_COSINE = 1 - 1e-6  # above it, a tensor counts as a multiple of another
_DEFAULT_TOLERANCE = 2e-2  # of 16 bits
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


Key = tuple[str, str]  # kind of a tensor, and the name of its parameter


class Reference:
    """Keeps parameters and gradients of one rank, before each of its first ``MAX_STEPS`` steps."""

    def __init__(self) -> None:
        self.steps: dict[StepOf, dict[Key, Tensor]] = {}

    def stepped(self, rank: int, at: StepOf, params: Named, site: Site) -> None:
        """Keep a step's tensors."""
        if at.step < MAX_STEPS:
            tensors = _tensors_of(params)
            self.steps[at] = {key: tensor.detach().clone() for key, tensor in tensors.items()}


def _tensors_of(params: Named) -> dict[Key, Tensor]:
    """Return the parameters, and then their gradients, if they have values of their own."""
    gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
    return {
        (kind, name): tensor
        for kind, tensors in ((PARAMETER, params), (GRADIENT, gradients))
        for name, tensor in tensors.items()
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    }


def _shapes(tensors: Mapping[Key, Tensor]) -> dict[str, torch.Size]:
    return {name: t.shape for (kind, name), t in tensors.items() if kind == PARAMETER}


class Against:
    """Compares the steps of all ranks with a reference."""

    def __init__(self, reference: Reference, num_ranks: int) -> None:
        self._reference, self._num_ranks = reference, num_ranks
        self._first: tuple[StepOf, int, str] | None = None  # and the place in the step, and a text
        self._compared: set[StepOf] = set()
        self._left_out: set[int] = set()  # ranks with other parameters

    @property
    def differs(self) -> bool:
        """True if a tensor differed."""
        return self._first is not None

    def stepped(self, rank: int, at: StepOf, params: Named, site: Site) -> None:
        """Compare a step's tensors, and remember the earliest difference of all ranks."""
        expected, found = self._reference.steps.get(at), _tensors_of(params)
        if expected is None:
            return
        if _shapes(expected) != _shapes(found):
            self._left_out.add(rank)
            return
        self._compared.add(at)
        for number, (key, one) in enumerate(expected.items()):
            difference = _difference(one, found.get(key), self._num_ranks)
            if difference and (self._first is None or (at, number) < self._first[:2]):
                text = f"step {at.step + 1}: {''.join(key)} on rank {rank} of {self._num_ranks}"
                self._first = at, number, f"{text} {difference}; {place(site)}"

    def lines(self) -> list[str]:
        """Return what was found, for the user."""
        left_out = (
            f"not compared: {rank_names(self._left_out)}, with other parameters than one rank"
        )
        steps = f"{counted(len(self._compared), 'step')} compared"
        found = self._first[-1] if self._first else f"{steps}: all equal those of one rank"
        if not self._compared:
            found = f"nothing was compared, in {counted(len(self._reference.steps), 'step')}"
        return [found, *([left_out] if self._left_out else [])]


def _difference(one: Tensor, other: Tensor | None, num_ranks: int) -> str:
    """Say how a tensor differs from that of one rank; "" if it does not."""
    if other is None:
        return "is missing, and is there on one rank"
    a, b = one.double().flatten(), other.detach().double().flatten()
    norm, distance = float(a.norm()), float((a - b).norm())
    tolerance = _TOLERANCES.get(one.dtype, _DEFAULT_TOLERANCE)
    if distance <= tolerance * max(norm, 1e-12):
        return ""
    if norm and float(b.norm()) and float(a @ b) >= MIN_COSINE * norm * float(b.norm()):
        return _of_factor(float(b.norm()) / norm, num_ranks)
    return f"differs from that on one rank (norm {float(b.norm()):.4g}, there {norm:.4g})"


def _of_factor(factor: float, num_ranks: int) -> str:
    reasons = {
        num_ranks: ", as if summed over the ranks and not divided",
        1 / num_ranks: ", as if divided by the number of ranks once too often",
    }
    reason = next((text for f, text in reasons.items() if abs(factor / f - 1) < 1e-3), "")
    return f"is {factor:.4g} times that on one rank{reason}"
