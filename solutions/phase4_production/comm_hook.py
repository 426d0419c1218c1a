"""A hook that lets data parallelism send compressed gradients, and forgets nothing of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase4_production.given import Group, Piece, Reduce, Started


class CompressionHook:
    """Lets data parallelism send compressed gradients; what is left behind goes with the next ones.

    A gradient of 0.4 in each step, and a ``reduce`` that sends whole numbers only:
        step              1      2      3      4      5
        gradient        0.4    0.4    0.4    0.4    0.4
        + residual      0.4    0.8    0.2    0.6    0.0
        sent              0      1      0      1      0     2 in all, as of the gradients
        residual        0.4   -0.2    0.2   -0.4    0.0

    It has two doors, for torch's DistributedDataParallel and for that of task 3.12:
        ddp.register_comm_hook(None, hook)
        DistributedDataParallel(module, all_reduce=hook.all_reduce)

    In every step, what ``reduce`` gets, once for each bucket, is this rank's gradients plus their
    residuals, with pieces in one order on all ranks; what they become is its ``mean``; and the
    residuals are then what it got, less what this rank ``sent``. Nothing else is sent.

    If the mean of a bucket holds a NaN or an infinity, its residuals stay as they were: training
    skips that step. No residual is ever NaN or infinite; what would be so becomes 0.

    A residual belongs to a parameter, whichever bucket that is in: torch lays out new buckets after
    the first step, and a program that was restarted begins with the first ones again.

    Args:
        module: module whose gradients are sent: the module itself, not the DistributedDataParallel
            around it. Pieces have the names of its ``named_parameters``, and the shapes of these.
            Each parameter fills its memory without gaps, as those of torch's layers do.
        reduce: such as a ``PowerSGD``, for the same ranks. It gets float32 or float64: gradients of
            16 bits are widened, and so residuals are never narrower than float32.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
    """

    def __init__(self, module: nn.Module, reduce: Reduce) -> None:
        """Prepare: no residuals, and nothing is sent yet."""
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self.reduce = reduce
        self.residuals: dict[str, Tensor] = {}  # shaped like the parameters
        # torch asks a hook for its names, which functions have and objects have not
        self.__name__ = self.__qualname__ = type(self).__name__

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of torch's DistributedDataParallel, which calls it.

        Args:
            state: the state that was registered; it is not used.
            bucket: holds gradients in the order of its parameters, and each of them laid out in
                memory as its parameter is: ``channels_last``, for example.

        Returns:
            A future of the whole buffer with the mean, which torch does not divide any more.
        """
        params, buffer = bucket.parameters(), bucket.buffer()
        parts = buffer.split([parameter.numel() for parameter in params])
        self._average(
            params,
            [
                part.as_strided(parameter.shape, parameter.stride())
                for part, parameter in zip(parts, params, strict=True)
            ],
        )
        return _done(buffer)

    def all_reduce(self, flat: Tensor, group: Group = None) -> Started:
        """Sum a bucket in place, as the ``all_reduce`` of task 3.12's DistributedDataParallel.

        Args:
            flat: the bucket; the gradients of its parameters are views of it.
            group: the ranks that train together; all by default.

        Returns:
            Something whose ``wait`` returns when ``flat`` holds the sum: N times the mean, which
            the caller divides by N.

        Raises:
            ValueError: ``flat`` has elements that are the gradient of no parameter.
        """
        params = self._params_in(flat)
        self._average(params, [p.grad for p in params if p.grad is not None])
        flat *= dist.get_world_size(group)
        return _done(flat)

    def _params_in(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters whose gradients lie in a bucket, in their order there."""
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        places = {p: p.grad.data_ptr() for p in self.names if p.grad is not None}
        found = [p for p, place in places.items() if begin <= place < end]
        num_known = sum(parameter.numel() for parameter in found)
        if num_known != flat.numel():
            raise ValueError(
                f"{num_known} of the {flat.numel()} elements of the bucket are gradients of the "
                "module: gradients should be views of their bucket, all over it"
            )
        return sorted(found, key=places.__getitem__)

    def _average(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their means, and keep what was left behind."""
        names = [self.names[parameter] for parameter in params]
        wanted = torch.cat(
            [
                self._with_residual(name, g).flatten()
                for name, g in zip(names, gradients, strict=True)
            ]
        )
        pieces = [Piece(name, g.shape) for name, g in zip(names, gradients, strict=True)]
        mean, sent = self.reduce(wanted, pieces)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, part in zip(gradients, mean.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))
        if mean.isfinite().all():  # otherwise, all ranks skip this step
            self._keep(pieces, wanted - sent)

    def _keep(self, pieces: Sequence[Piece], left: Tensor) -> None:
        """Keep what was left behind of each piece."""
        left = torch.where(left.isfinite(), left, 0.0)  # a NaN would stay forever
        parts = left.split([piece.shape.numel() for piece in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            self.residuals[piece.name] = part.view(piece.shape)

    def _with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient with what was left behind of those before."""
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        residual = self.residuals.get(name)
        return wide if residual is None else wide + residual.to(wide)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run of this rank needs to continue bit for bit: a copy.

        Residuals differ from rank to rank: each rank saves its own state. It holds that of
        ``reduce``, too, if that has a ``state_dict``.
        """
        residuals = {name: residual.clone() for name, residual in self.residuals.items()}
        of_reduce: dict[str, Any] = getattr(self.reduce, "state_dict", dict)()
        return {"residuals": residuals, "reduce": of_reduce}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same rank, which is only read."""
        self.residuals = {name: kept.clone() for name, kept in state["residuals"].items()}
        if hasattr(self.reduce, "load_state_dict"):
            self.reduce.load_state_dict(state["reduce"])


def _done(tensor: Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is there already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
