"""A training as in torch's public example of FSDP2: a model on meta, filled when it is sharded."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 8, 16, 4
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_ZERO = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Values = dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")
        self.resid_dropout, self.dropout = nn.Dropout(dropout), dropout

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k, v = parts
        dropout = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(q, k, v, None, dropout)
        out: Tensor = self.resid_dropout(self.wo(y.transpose(1, 2).flatten(2)))
        return out


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        out: Tensor = h + self.resid_dropout(self.w2(gelu(self.w1(self.ffn_norm(h)))))
        return out


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        h = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.output(self.norm(h)).float()
        return logits

    def reset_parameters(self) -> None:
        parts: Iterator[Any] = self.modules()
        for part in parts:
            if part is not self and hasattr(part, "reset_parameters"):
                part.reset_parameters()


def sharded(dropout: float) -> Any:
    """Return a model whose shards are on meta."""
    with torch.device("meta"):
        model = Transformer(dropout)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.placements, parameter.is_meta) == ((Shard(0),), True)
    return model


def filled(dropout: float, device: torch.device) -> Any:
    model = sharded(dropout)
    model.to_empty(device=device)
    model.reset_parameters()
    return model


def batch_of(step: int, device: torch.device) -> Tensor:
    """Return this rank's half or all of a step's eight sequences."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def train(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> list[float]:
    losses = []
    for step in range(3):
        model.unshard()
        loss = model(batch_of(step, device)).logsumexp(-1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


def main(folder: Path, dropout: float) -> tuple[Values, Values, list[float]]:
    """Train, save and load; return the values at the start, those at the end, and the losses."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = filled(dropout, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = whole(model)
    losses = train(model, optimizer, device)
    end = whole(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(state, checkpoint_id=folder / "dcp")
    for again in (loaded_by_dcp(folder, device), loaded_from_zero(model, optimizer, device)):
        assert all(torch.equal(value, end[name]) for name, value in whole(again).items())
    return start, end, losses


def whole(model: nn.Module) -> Values:
    return {name: value.full_tensor().detach().cpu() for name, value in named(model)}


def named(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        yield name, parameter


def loaded_by_dcp(folder: Path, device: torch.device) -> Any:
    model = filled(0.0, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    values, moments = get_state_dict(model, optimizer)
    load({"model": values, "optimizer": moments}, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, values)
    set_optimizer_state_dict(model, optimizer, moments)
    return model


def loaded_from_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Any:
    """Return a model with the full state, which only rank 0 has."""
    values = get_model_state_dict(model, options=FULL)
    moments = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert bool(values) == bool(moments) == (dist.get_rank() == 0)
    again = sharded(0.0)
    again.to_empty(device=device)
    set_model_state_dict(again, values, options=FROM_ZERO)
    fresh = torch.optim.Adam(again.parameters(), lr=1e-2)
    set_optimizer_state_dict(again, fresh, moments, options=FROM_ZERO)
    return again
