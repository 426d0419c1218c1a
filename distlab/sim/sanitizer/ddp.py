"""What each rank does with a model in DistributedDataParallel from one step to the next.

If gradients were not averaged, this tells why. What DistributedDataParallel needs for its average:

    its forward  ─▶  outside no_sync()  ─▶  a gradient for each parameter  ─▶  a hook that averages
"""

import contextlib
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from distlab.sim.isolation.rank_states import RankStates
from distlab.sim.reporting.report import place
from distlab.sim.reporting.sites import PROGRAM, Places, Site
from distlab.util.replacing import Replace
from distlab.util.text import some_of


@dataclass
class Uses:
    """What a rank did with a model since the last step.

    Attributes:
        forwards: For each forward pass, the line that called ``no_sync()``; None if it is outside.
        inside_at: First line that called the module inside, and not the wrapper.
    """

    model: "Wrapped"
    forwards: list[Site | None] = field(default_factory=list)
    inside_at: Site | None = None
    has_stepped: bool = False

    def why_not(self, lacking: Sequence[str]) -> str:
        """Return why the model's gradients were not averaged.

        Args:
            lacking: Names of its parameters that got no gradient.
        """
        inside = f"the module inside, {place(self.inside_at)}" if self.inside_at else ""
        if not self.forwards:
            at = f", but that of {inside}" if inside else ""
            return f"its forward was not called{at}. Call the wrapper: that prepares the average."
        if no_sync_at := self.forwards[-1]:
            are_all = all(self.forwards)
            which = "its forward passes ran" if are_all else "its last forward pass ran"
            return (
                f"{which} inside no_sync(), {place(no_sync_at)}. The last backward pass before a "
                "step, and its forward pass, must run outside no_sync()."
            )
        if lacking and self.model.waits_for_all:
            return (
                f"it waited for the gradients of {some_of(lacking)}, which the loss does not use. "
                "Leave such parameters out of the model, or give find_unused_parameters=True."
            )
        if self.model.hook:
            return (
                f"its communication hook, {self.model.hook}, has returned them as they were. It "
                "has to average every bucket."
            )
        others = f"another one, a call of {inside}," if inside else "another one"
        return (
            f"it averages in the first backward pass after a forward pass. Did {others} or the "
            "program change the gradients afterwards?"
        )


class Wrapped:
    """A model in DistributedDataParallel, on one rank.

    Attributes:
        ranks: Ranks over which it averages.
        made_at: Line that wrapped it.
        waits_for_all: True if its buckets wait for the gradients of all parameters.
        hook: Name and line of its communication hook; "" if it has none.
        no_sync_at: Line that last called ``no_sync()``.
    """

    def __init__(self, ddp: DistributedDataParallel, made_at: Site, *, has_broadcast: bool) -> None:
        self._has_broadcast = has_broadcast
        self.ranks = dist.get_process_group_ranks(ddp.process_group)
        self.made_at = made_at
        self.no_sync_at: Site | None = None
        self.waits_for_all = not (ddp.find_unused_parameters or ddp.static_graph)
        self.hook = ""
        self._uses = Uses(self)

    def why_unequal(self) -> str:
        """Return why its parameters are not equal on all ranks, and what to do."""
        made = f"when it is made, {place(self.made_at)}"
        if not self._has_broadcast:
            return (
                f"DistributedDataParallel, given init_sync=False, broadcasts nothing {made}: begin "
                "with equal parameters"
            )
        return (
            f"DistributedDataParallel broadcasts rank 0's {made}. Has something changed them since "
            "then, such as load_state_dict on one rank? Do it on all ranks, or on rank 0 before"
        )

    def uses(self) -> Uses:
        """Return what was done since the last step, to which more may be added."""
        if self._uses.has_stepped:
            self._uses = Uses(self)
        return self._uses

    def stepped(self) -> Uses:
        """Return what was done for a step."""
        self._uses.has_stepped = True
        return self._uses


class Wrappings:
    """Watches the models that ranks wrap.

    Attributes:
        groups: Keys of the groups over which they average.
        frozen: Parameters that required no gradient when their model was wrapped.
    """

    def __init__(self, rank_states: RankStates, places: Places) -> None:
        self._rank_states, self._places = rank_states, places
        self.groups: set[object] = set()
        self.frozen: MutableMapping[Tensor, Wrapped] = WeakIdKeyDictionary()
        self._of: MutableMapping[nn.Module, Wrapped] = WeakKeyDictionary()  # also parts of models
        self._of_parameter: MutableMapping[Tensor, Wrapped] = WeakIdKeyDictionary()
        self._inside: set[int] = set()  # ranks that are in the forward of a wrapper

    def of(self, parameter: Tensor) -> Wrapped | None:
        """Return the model in which a parameter's gradient is averaged, or None."""
        return self._of_parameter.get(parameter)

    def install(self, replace: Replace) -> None:
        """Watch DistributedDataParallel."""
        ddp_type: Any = DistributedDataParallel
        wrap, forward = ddp_type.__init__, ddp_type.forward
        no_sync, register = ddp_type.no_sync, ddp_type.register_comm_hook

        def wrap_and_note(ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            wrap(ddp, module, *args, **kwargs)
            if self._rank_states.is_in_rank():
                self._wrapped(ddp, module, has_broadcast=kwargs.get("init_sync", True))

        def forward_and_note(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if ddp not in self._of:
                return forward(ddp, *args, **kwargs)
            with self._going_forward(ddp):
                return forward(ddp, *args, **kwargs)

        def no_sync_and_note(ddp: Any) -> Any:
            if ddp in self._of:
                self._of[ddp].no_sync_at = self._places.call_site()[0]
            return no_sync(ddp)

        def register_and_note(ddp: Any, state: object, hook: Any) -> None:
            register(ddp, state, hook)
            if ddp in self._of:
                self._of[ddp].hook = _title(hook)

        replace(ddp_type, "__init__", wrap_and_note)
        replace(ddp_type, "forward", forward_and_note)
        replace(ddp_type, "no_sync", no_sync_and_note)
        replace(ddp_type, "register_comm_hook", register_and_note)

    def _wrapped(self, ddp: Any, module: nn.Module, *, has_broadcast: bool) -> None:
        wrapped = Wrapped(ddp, self._places.call_site()[0], has_broadcast=has_broadcast)
        self.groups.add(ddp.process_group._key)
        self._of.update(dict.fromkeys([ddp, *module.modules()], wrapped))
        for parameter in module.parameters():
            owners = self._of_parameter if parameter.requires_grad else self.frozen
            owners[parameter] = wrapped

    @contextlib.contextmanager
    def _going_forward(self, ddp: DistributedDataParallel) -> Iterator[None]:
        wrapped, rank = self._of[ddp], self._rank_states.current
        if torch.is_grad_enabled():
            no_sync_at = wrapped.no_sync_at or self._places.call_site()[0]
            wrapped.uses().forwards.append(None if ddp.require_backward_grad_sync else no_sync_at)
        self._inside.add(rank)
        try:
            yield
        finally:
            self._inside.discard(rank)

    def called(self, module: nn.Module, _: object) -> None:
        """Look at a module that the running rank calls; it may be one inside a wrapper."""
        wrapped = None if isinstance(module, DistributedDataParallel) else self._of.get(module)
        is_in_rank = self._rank_states.is_in_rank() and torch.is_grad_enabled()
        if wrapped is None or not is_in_rank:
            return
        is_backward = torch._C._current_graph_task_id() != -1  # as where a checkpoint recomputes
        if not is_backward and self._rank_states.current not in self._inside:
            uses = wrapped.uses()
            uses.inside_at = uses.inside_at or self._caller(wrapped)

    def _caller(self, wrapped: Wrapped) -> Site:
        """Return the line that called a model, outside the methods of its modules.

        The variables of frames are left alone: looking at them keeps tensors alive.
        """
        own = {code for module, of in self._of.items() if of is wrapped for code in _codes(module)}
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if code not in own and self._places.kind(code.co_filename) == PROGRAM:
                return self._places.call_site(frame)[0]
            frame = frame.f_back
        return self._places.call_site()[0]


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of a module's methods."""
    for kind in type(module).__mro__:
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                yield method.__code__


def _title(hook: Any) -> str:
    """Return a hook's name and line."""
    function = getattr(hook, "func", hook)  # of a partial
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(hook).__name__).split("<locals>.")[-1]
    return f"{name} at {Path(code.co_filename).name}:{code.co_firstlineno}" if code else name
