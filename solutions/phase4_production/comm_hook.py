"""A hook that lets data parallelism send compressed gradients without losing anything."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase4_production.given import Group, Piece, Reduce, Started


class CompressionHook:
    """Lets data parallelism send compressed gradients; what is left out is sent in later steps.

    For a gradient of 0.4 in each step, and a ``reduce`` that sends only whole numbers:
        step              1      2      3      4      5
        gradient        0.4    0.4    0.4    0.4    0.4
        + residual      0.4    0.8    0.2    0.6    0.0
        sent              0      1      0      1      0     2 in all, like the gradients
        residual        0.4   -0.2    0.2   -0.4    0.0

    The hook has two entry points: one for torch's DistributedDataParallel, and one for the class of
    task 3.11:
        ddp.register_comm_hook(None, hook)
        DistributedDataParallel(module, all_reduce=hook.all_reduce)

    In every step, ``reduce`` is called once per bucket, with this rank's gradients plus their
    residuals; the pieces are in the same order on all ranks. The ``mean`` that it returns replaces
    the gradients, and its input minus what this rank ``sent`` becomes the new residuals. Nothing
    else is sent.

    If the mean of a bucket holds a NaN or an infinity, the residuals of that bucket stay unchanged,
    because training skips that step. If it is finite as ``reduce`` returns it, and infinite only in
    a bucket of 16 bits, the residuals may change or not. No residual is ever NaN or infinite; such
    values become 0.

    A residual belongs to a parameter, not to a bucket: torch lays out new buckets after the first
    step, and a restarted program begins with the original ones.

    Args:
        module: module whose gradients are sent: the module itself, not the DistributedDataParallel
            around it. Pieces have the names and shapes of its ``named_parameters``. Each parameter
            fills its memory without gaps, as parameters of torch's layers do.
        reduce: compressor for the same ranks, such as a ``PowerSGD``. It gets float32 or float64,
            because 16-bit gradients are widened first; so residuals are never narrower than
            float32.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847), algorithm 2.
    """

    def __init__(self, module: nn.Module, reduce: Reduce) -> None:
        """Start without residuals; nothing is sent."""
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self.reduce = reduce
        self.residuals: dict[str, Tensor] = {}  # shaped like the parameters
        # torch reads a hook's __name__ and __qualname__, which functions have and instances lack
        self.__name__ = self.__qualname__ = type(self).__name__

    def __call__(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of torch's DistributedDataParallel, which calls this.

        Args:
            state: registered state, which is not used.
            bucket: bucket whose gradients are in the order of its parameters. Each gradient is laid
                out in memory like its parameter, for example in ``channels_last``. The tensors of
                ``bucket.gradients()`` do not show this: they have the parameters' shapes, but
                always the strides of rows.

        Returns:
            A future of the bucket's buffer, which then holds the mean; torch does not divide it
            again.
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
        """Sum a bucket in place; task 3.11's DistributedDataParallel takes this as ``all_reduce``.

        Args:
            flat: the bucket; the gradients of its parameters are views of it.
            group: the ranks that train together; all by default.

        Returns:
            An object whose ``wait`` returns when ``flat`` holds the sum, that is, N times the mean.
            The caller divides it by N.

        Raises:
            ValueError: ``flat`` has elements that belong to no parameter's gradient.
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
        """Replace the gradients with their means, and keep what was not sent."""
        named = zip(params, gradients, strict=True)
        pieces = [Piece(self.names[parameter], g.shape) for parameter, g in named]
        wanted = self._with_residuals(pieces, gradients)
        mean, sent = self.reduce(wanted, pieces)
        for gradient, part in zip(gradients, _parts(mean, pieces), strict=True):
            gradient.copy_(part)
        extremes = torch.stack(mean.aminmax())  # a NaN is both of them
        self._keep(pieces, wanted.sub_(sent), extremes.isfinite().all())

    def _with_residuals(self, pieces: Sequence[Piece], gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradients plus their residuals, flat and in float32 or wider."""
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        flat = gradients[0].new_empty(sum(g.numel() for g in gradients), dtype=dtype)
        for piece, part, gradient in zip(pieces, _parts(flat, pieces), gradients, strict=True):
            residual = self.residuals.get(piece.name, gradient.new_zeros(()))
            torch.add(gradient, residual.to(part), out=part)
        return flat

    def _keep(self, pieces: Sequence[Piece], left: Tensor, is_kept: Tensor) -> None:
        """Keep the unsent rest of each piece, unless all ranks skip this step.

        An ``if`` would make the host wait for a GPU in the middle of the backward pass.
        """
        left.nan_to_num_(0.0, 0.0, 0.0)  # a NaN would stay forever
        for piece, new in zip(pieces, _parts(left, pieces), strict=True):
            old = self.residuals.get(piece.name, new.new_zeros(())).to(new)
            self.residuals[piece.name] = torch.where(is_kept, new, old, out=new)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what this rank needs to continue bit for bit in a later run.

        Residuals differ from rank to rank, so each rank saves its own state. The state includes
        that of ``reduce`` if ``reduce`` has a ``state_dict``.
        """
        residuals = {name: residual.clone() for name, residual in self.residuals.items()}
        of_reduce: dict[str, Any] = getattr(self.reduce, "state_dict", dict)()
        return {"residuals": residuals, "reduce": of_reduce}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank; the state is not changed."""
        self.residuals = {name: kept.clone() for name, kept in state["residuals"].items()}
        if hasattr(self.reduce, "load_state_dict"):
            self.reduce.load_state_dict(state["reduce"])


def _parts(flat: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return the pieces of a flat tensor, in their shapes."""
    parts = flat.split([piece.shape.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def _done(tensor: Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is already complete."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
