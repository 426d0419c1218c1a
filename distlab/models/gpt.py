"""A small hand-written GPT, the model of the tensor-parallel lessons.

B sequences of T tokens; V = vocabulary, E = width, H = heads, D = E / H = width of one head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """Predict the next token at every position, from the tokens up to that position.

        tokens -> embedding + position -> L x (attention, feed-forward) -> norm -> head -> logits

    The head and the embedding are tied: one (V, E) parameter, used at both ends.

    Args:
        vocab_size: V; tokens are 0 .. V - 1.
        context: Length of the longest sequence.
        width, layers, heads: E, L and H; H divides E.
    Raises: ValueError: ``heads`` does not divide ``width``.
    Cost: V * E + context * E + 2 * E + L * (12 * E^2 + 13 * E) parameters.
    Source: Radford et al. 2019 (GPT-2), section 2.3; Press and Wolf 2017 for the tied embedding.
    """

    def __init__(
        self, vocab_size: int, context: int, *, width: int = 64, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width, got width {width} and heads {heads}")
        self.embedding = Embedding(vocab_size, context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.token.weight
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits for the next token at every position.

        Args: tokens: (B, T) int64, T at most the context.
        Returns: (B, T, V); position t scores the token at t + 1.
        Raises: ValueError: The sequences are longer than the context.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        """Draw all weights as GPT-2 does, so that activations neither grow nor fade with depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        adders = [m.out for m in self.modules() if isinstance(m, Attention)]
        adders += [m.down for m in self.modules() if isinstance(m, FeedForward)]
        for layer in adders:  # 2 L layers add to the residual stream; keep the sum small
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(len(adders)))


class Embedding(nn.Module):
    """Turn tokens into vectors that encode token and position."""

    def __init__(self, vocab_size: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, E)
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ValueError(f"sequences may have up to {context} tokens, got {length}")
        y: Tensor = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        return y


class Block(nn.Module):
    """Add attention, then feed-forward, to the residual stream, each after a norm (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Attention(nn.Module):
    """Mix each position with those before it, in H independent heads.

    The number of heads follows from the size of ``query``: once query, key and value keep only 1/N
    of their rows, and ``out`` 1/N of its columns, the same code computes 1/N of the heads.
    """

    is_causal = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)  # (B, H, T, D)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _split(self, x: Tensor) -> Tensor:  # (B, T, H * D) -> (B, H, T, D)
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """Process each position by itself: widen it fourfold, apply a non-linearity, and narrow it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y
