"""The optimizer steps of all ranks, for those who look at them."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.gpu.device import await_values
from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.sites import Places, Site
from distlab.sim.results.simulated import Observer, StepOf
from distlab.sim.sanitizer.draws import Unnoticed
from distlab.sim.sanitizer.parameters import Held, Parameters, distinct_names

Listener = Callable[[int, StepOf, Optimizer, Site], object]
ListenerAfter = Callable[[int, int], object]
_LAST_HOOK = -1  # key of a hook of an optimizer; torch's keys are not negative


class Steps:
    """Counts each rank's optimizer steps, and calls listeners before and after each of them.

    Attributes:
        parameters: The parameters that the ranks have registered, with their names.
        listeners: Functions that get the rank, the step, the optimizer and the program's line.
        listeners_after: Functions that get the rank and the optimizer's number after each step.
        kind_of: Function that tells kinds of optimizers apart. Those of each kind are numbered by
            themselves, so that a rank that has more of one kind does not shift the others.
    """

    def __init__(self, rank_states: RankStates, places: Places, unnoticed: Unnoticed) -> None:
        self.parameters = Parameters()
        self.listeners: list[Listener] = []
        self.listeners_after: list[ListenerAfter] = []
        self.kind_of: Callable[[Optimizer], object] = lambda _: ""
        self._rank_states, self._places, self._unnoticed = rank_states, places, unnoticed
        # For each rank's optimizer, its next step.
        self._next: defaultdict[int, MutableMapping[Optimizer, StepOf]] = defaultdict(
            WeakIdKeyDictionary
        )
        self._num_optimizers: Counter[tuple[int, object]] = Counter()  # by rank and kind
        self._numbers: dict[tuple[object, int], int] = {}
        self._stepping: set[int] = set()  # ranks that are in a step now
        self._hooked: WeakSet[Optimizer] = WeakSet()

    def number(self, rank: int) -> int:
        """Return the number of the step that a rank takes now, or else of its next one.

        It counts from 1, and is 0 if the rank has nothing to optimize.
        """
        if not self.parameters.has_any(rank):
            return 0
        num_begun = max((at.step for at in self._next[rank].values()), default=0)
        return num_begun if rank in self._stepping else num_begun + 1

    def show(self, observer: Observer) -> None:
        """Call an observer at each step, with the parameters by their names."""
        self.listeners.append(
            lambda rank, at, optimizer, site: observer.stepped(
                rank, at, self._named(optimizer), site
            )
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the ranks that run inside the block."""
        hooks = (
            register_module_parameter_registration_hook(self._registered),
            register_module_module_registration_hook(self._held),
            register_optimizer_step_pre_hook(self._will_step),
            register_optimizer_step_post_hook(self._stepped),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for optimizer in self._hooked:  # those whose last step has raised an error
                optimizer._optimizer_step_pre_hooks.pop(_LAST_HOOK, None)

    def _registered(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None and self._rank_states.is_in_rank():
            self._note_replacement(module._parameters.get(name), parameter)
            self.parameters.register(self._rank_states.current, module, name, parameter)

    def _held(self, module: nn.Module, name: str, held: nn.Module | None) -> None:
        if held is not None:
            self._note_replacement(module._modules.get(name), held)
            self.parameters.hold(module, name, held)

    def _note_replacement(self, before: Held | None, held: Held) -> None:
        if before is not None and before is not held and self._rank_states.is_in_rank():
            self.parameters.replaces(held, self._places.call_site()[0])

    def _will_step(self, optimizer: Optimizer, *_: object) -> None:
        """Look at the step after the optimizer's own hooks: they may still average gradients."""
        if self._rank_states.is_in_rank():
            self._hooked.add(optimizer)
            hooks = optimizer._optimizer_step_pre_hooks
            hooks.pop(_LAST_HOOK, None)
            hooks[_LAST_HOOK] = self._steps

    def _steps(self, optimizer: Optimizer, *_: object) -> None:
        site = self._places.call_site()[0]
        rank = self._rank_states.current
        self._stepping.add(rank)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # The step itself waits for those that it changes; others may be under way for long.
        await_values(x for p in parameters if p.grad is not None for x in (p, p.grad))
        with self._unnoticed():
            at = self._count(rank, optimizer)
            for listener in self.listeners:
                listener(rank, at, optimizer, site)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if not self._rank_states.is_in_rank():
            return
        optimizer._optimizer_step_pre_hooks.pop(_LAST_HOOK, None)
        rank = self._rank_states.current
        self._stepping.discard(rank)
        with self._unnoticed():
            for listener in self.listeners_after:
                listener(rank, self._next[rank][optimizer].optimizer)

    def _count(self, rank: int, optimizer: Optimizer) -> StepOf:
        known = self._next[rank]
        if optimizer not in known:
            known[optimizer] = StepOf(0, self._new_number(rank, self.kind_of(optimizer)))
        at = known[optimizer]
        known[optimizer] = StepOf(at.step + 1, at.optimizer)
        return at

    def _new_number(self, rank: int, kind: object) -> int:
        nth = kind, self._num_optimizers[rank, kind]
        self._num_optimizers[rank, kind] += 1
        return self._numbers.setdefault(nth, len(self._numbers))

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return an optimizer's parameters by their names, which differ."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return dict(zip(distinct_names(self.parameters, params), params, strict=True))
