"""Bodies for 3.18 and 3.19: an optimizer from its construction to its last step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phase3.zero import Net, listed, loss_of, net, train_with

OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
NEXT_LR = 0.02
# what comes before each step: calls of zero_grad, another learning rate, and backward passes, of
# all or of one parameter
LIFE = (
    ("a step with one backward pass", ("own", "pass")),
    ("a step after module.zero_grad() and zero_grad()", ("module", "own", "pass")),
    ("a step with another learning rate, set in optimizer.param_groups", ("own", "lr", "pass")),
    ("a second step with that learning rate", ("own", "pass")),
    ("a step with zero gradients", ("own",)),
    ("a step after two backward passes without zero_grad in between", ("own", "pass", "pass")),
    ("a step after zero_grad(), twice, without a backward pass", ("own", "own")),
    ("a step after a backward pass that uses the parameter scale alone", ("own", "scale")),
)


def live_through(
    lesson: Any, cls: str, kinds: Sequence[str], keywords: dict[str, Any], group: Any = None
) -> dict[str, list[dict[str, list[float]]]]:
    """Take the steps of ``LIFE`` with each kind of model; return the parameters after each."""
    return {kind: _life_of(lesson, cls, kind, keywords, group) for kind in kinds}


def _life_of(
    lesson: Any, cls: str, kind: str, keywords: dict[str, Any], group: Any
) -> list[dict[str, list[float]]]:
    rank, found = dist.get_rank(group), []
    model = net(kind, 0)
    of_group = {"group": group} if group else {}
    options = OPTIONS | keywords | of_group
    params = dict(model.named_parameters(remove_duplicate=False))
    if cls == "ShardedOptimizer":  # whose construction moves gradients, too
        _loss(model, "pass", rank, 0).backward()
    sharded = getattr(lesson, cls)(iter(params.values()), torch.optim.SGD, **options)
    for number, (_, before) in enumerate(LIFE):
        for action in before:
            if action == "own":
                sharded.zero_grad()
            elif action == "module":
                model.zero_grad()
            elif action == "lr":
                _set_learning_rate(sharded.optimizer)
            else:
                _loss(model, action, rank, number).backward()
        sharded.step()
        found.append(listed(params))
    return found


def _set_learning_rate(optimizer: torch.optim.Optimizer) -> None:
    """Set it as a scheduler does."""
    for group in optimizer.param_groups:
        group["lr"] = NEXT_LR


def _loss(model: Net, action: str, rank: int, number: int) -> Tensor:
    return loss_of(model, rank, number) if action == "pass" else (rank + 1) * model.scale.sum()


def plain_life(kind: str, n: int) -> list[dict[str, list[float]]]:
    """Return the parameters after each step of ``LIFE`` without any sharding."""
    model, found = net(kind, 0), []
    trained = [param for param in model.parameters() if param.requires_grad]
    sgd = torch.optim.SGD(trained, **OPTIONS)  # type: ignore[arg-type]
    for number, (_, before) in enumerate(LIFE):
        for param in trained:
            param.grad = torch.zeros_like(param)
        for action in before:
            if action == "lr":
                _set_learning_rate(sgd)
            for rank in range(n if action in ("pass", "scale") else 0):
                (_loss(model, action, rank, number) / n).backward()
        sgd.step()
        found.append(listed(dict(model.named_parameters(remove_duplicate=False))))
    return found


# Two dtypes, tied and frozen parameters

NARROW, WIDE, FROZEN = ((7, 2), (13,)), ((5,),), (11,)


def elements_bytes(n: int) -> int:
    """Bytes of the trained parameters, padded for n ranks, each in its own dtype."""
    narrow, wide = 27, 5  # elements of NARROW and WIDE
    return 2 * (narrow + -narrow % n) + 4 * (wide + -wide % n)


def take_mixed_steps(
    lesson: Any, cls: str, keywords: dict[str, Any], steps: int, group: Any = None
) -> list[float]:
    """Take steps of two backward passes, of which the first does not use all; return the frozen.

    The frozen parameter holds the number of the rank, plus 1.
    """
    narrow = [nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in NARROW]
    wide = [nn.Parameter(torch.ones(shape)) for shape in WIDE]
    frozen = nn.Parameter(
        torch.full(FROZEN, dist.get_rank(group) + 1.0, dtype=torch.bfloat16), requires_grad=False
    )
    params = [*narrow, frozen, *wide, narrow[0]]  # one is tied, and comes twice
    of_group = {"group": group} if group else {}
    sharded = getattr(lesson, cls)(params, torch.optim.SGD, lr=0.1, **keywords, **of_group)
    for _ in range(steps):
        sharded.zero_grad()
        _total([narrow[0], *wide]).backward()
        _total([*narrow, *wide]).backward()
        sharded.step()
    values: list[float] = frozen.tolist()
    return values


def _total(params: Sequence[Tensor]) -> Tensor:
    return torch.stack([param.float().sum() for param in params]).sum()


def do_all_in_group(
    lesson: Any, cls: str, cases: tuple[tuple[str, str, int], ...], keywords: Any, group: Any
) -> dict[str, Any]:
    """Train, live through ``LIFE``, and take a step beside a frozen parameter, in one world."""
    return {
        "trained": train_with(lesson, cls, cases, group),
        "life": live_through(lesson, cls, ("frozen",), keywords, group),
        "frozen": take_mixed_steps(lesson, cls, keywords, 1, group),
    }


def reduce_once(lesson: Any, cls: str) -> list[Any]:
    """Return dtype and numbers of the shards that ``reduce_gradients`` returns, in 16 bits.

    The gradients on rank r of N are N(r+1) times (1, 2, 3, 4, 5).
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    sharded = getattr(lesson, cls)([weight], torch.optim.SGD, lr=0.1)
    sharded.zero_grad()
    factors = n * (rank + 1) * torch.arange(1, 6, dtype=torch.bfloat16)
    (weight * factors).sum().backward()
    return [[str(shard.dtype), shard.tolist()] for shard in sharded.reduce_gradients()]


def start_twice(lesson: Any) -> list[list[float]]:
    """Start two reductions and finish them, twice; return what was used, in this order.

    What uses a shard calls a barrier, so that the trace shows what has started by then.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    reduction, used = lesson.Reduction(None), list[list[float]]()

    def use(shard: Tensor) -> None:
        used.append(shard.tolist())
        dist.barrier()

    for number in (1.0, 2.0):
        reduction.start(torch.full((2 * n,), number * (rank + 1)), use)
    reduction.finish()
    reduction.finish()
    return used
