"""torchvision's models and a GPT as the production trainer builds and cuts them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distlab.models.gpt import GPT, Attention, Embedding
from distlab.models.vision import SMALL, VIT_HEADS, build_cnn, build_vit, with_small_stem
from distlab.production.config import Config
from distlab.production.samples import blank, dtype_of
from distlab.torchvision_repair import import_torchvision

VITS: dict[str, dict[str, int]] = {  # Dosovitskiy et al. 2020, table 1; Touvron et al. 2021 for S
    "vit_s16": {"num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536},
    "vit_b16": {"num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072},
}

MOST_GRAPHS = 64  # all blocks run one function, and need a graph for each shape: 8 in a ResNet-50


def build_model(config: Config, num_classes: int, device: torch.device) -> nn.Module:
    """Build a model on a device; the same seed gives the same parameters on all ranks.

    name           parameters   images
    resnet18             11 M   up to 64 x 64 enter through a 3 x 3 convolution, others a 7 x 7 one
    resnet50             25 M   the same
    vit_s16              22 M   sides are multiples of 16
    vit_b16              86 M   the same
    transformer         0.1 M   a ViT with 4 layers and width 64, for small images
    cnn                 0.1 M   three convolutions without norms, for small images
    gpt                 any     texts of ``sequence_length`` tokens; ``num_classes`` are its tokens
    """
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model: Any = _build(config, num_classes)
    is_last = config.channels_last and config.strategy != "fsdp" and not config.has_servers
    layout = torch.channels_last if is_last else torch.contiguous_format  # others cut the weights
    built: nn.Module = model.to(device, dtype_of(config), memory_format=layout)
    return built


def _build(config: Config, num_classes: int) -> nn.Module:
    if config.model == "gpt":
        sizes = {"width": config.width, "layers": config.layers, "heads": config.heads}
        return GPT(num_classes, config.sequence_length, **sizes)
    side, models = config.image_size, import_torchvision().models
    if config.model in ("transformer", "cnn"):
        build = build_vit if config.model == "transformer" else build_cnn
        return build((3, side, side), num_classes)
    if config.model in VITS:
        patches = {"image_size": side, "patch_size": 16, "num_layers": 12}
        vit: nn.Module = models.VisionTransformer(
            **patches, **VITS[config.model], num_classes=num_classes
        )
        return vit
    resnet: nn.Module = getattr(models, config.model)(num_classes=num_classes)
    return with_small_stem(resnet, 3) if side <= SMALL else resnet


# Layers, for pipelines


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Cut a model into layers; called one after the other, they give the model's result."""
    whole: Any = model
    if isinstance(model, GPT):
        return [model.embedding, *model.blocks, _Logits(model.norm, model.head)]
    if isinstance(model, nn.Sequential):
        return [*model]
    if hasattr(whole, "encoder"):
        return [_Patches(whole), *whole.encoder.layers, _Head(whole)]
    stem = nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool)
    blocks = [block for i in range(1, 5) for block in getattr(whole, f"layer{i}")]
    return [stem, *blocks, nn.Sequential(whole.avgpool, nn.Flatten(1), whole.fc)]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block for training, before a strategy wraps it.

    The gradients of a block can then travel while the blocks before it still compute; a model that
    is compiled whole returns all gradients at once. Evaluations, with a last batch that is smaller,
    are not compiled.
    """
    from torch._dynamo import config as dynamo

    dynamo.recompile_limit = MOST_GRAPHS
    blocks: list[Any] = layers_of(model)[1:-1]
    for block in blocks:
        block.forward = _compiled_for_training(block.forward)


def _compiled_for_training(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(forward, dynamic=False)

    def call(x: Tensor) -> Tensor:
        return compiled(x) if torch.is_grad_enabled() else forward(x)

    return call


class _Logits(nn.Sequential):
    """The part of a GPT after its blocks: a norm, and logits of the next token."""


class _Patches(nn.Module):
    """The part of a ViT before its blocks: patches, class token, positions."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.conv_proj, self.class_token = vit.conv_proj, vit.class_token
        self.pos_embedding, self.dropout = vit.encoder.pos_embedding, vit.encoder.dropout

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, S, S) -> (B, 1 + patches, E)
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        y: Tensor = self.dropout(tokens + self.pos_embedding)
        return y


class _Head(nn.Module):
    """The part of a ViT after its blocks: a norm, and logits from the class token."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.norm, self.heads = vit.encoder.ln, vit.heads

    def forward(self, x: Tensor) -> Tensor:  # (B, 1 + patches, E) -> (B, classes)
        y: Tensor = self.heads(self.norm(x)[:, 0])
        return y


def tied_weight(stage: nn.Module) -> Tensor | None:
    """Return the weight of a GPT that its first and last stage share, or None in other stages."""
    for module in stage.modules():
        if isinstance(module, Embedding):
            return module.token.weight
        if isinstance(module, _Logits):
            return next(module[-1].parameters())
    return None


@torch.no_grad()
def layer_flops(layers: list[nn.Module], config: Config) -> list[float]:
    """Count each layer's forward FLOPs for a sample; random generators keep their state."""
    with next(layers[0].parameters()).device:
        x, _ = blank(config, 1)
    flops = list[float]()
    for layer in layers:
        was_training = layer.training
        counter = FlopCounterMode(display=False)
        with counter:
            x = layer.eval()(x)
        layer.train(was_training)
        flops.append(float(max(counter.get_total_flops(), 1)))
    return flops


# Layers that can be split by heads, for tensor parallelism


class SplitAttention(Attention):
    """torch's self-attention with separate layers for queries, keys and values.

    The number of heads follows from the rows of ``query``: 1/N of the rows make 1/N of the heads.
    """

    is_causal = False

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        with attention.in_proj_weight.device:
            super().__init__(attention.embed_dim, attention.num_heads)
        self.to(attention.in_proj_weight.dtype)
        weights = *attention.in_proj_weight.chunk(3), attention.out_proj.weight
        biases = *attention.in_proj_bias.chunk(3), attention.out_proj.bias
        layers = self.query, self.key, self.value, self.out
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            layer.weight.data.copy_(weight.detach())
            layer.bias.data.copy_(bias.detach())

    def forward(  # type: ignore[override]
        self, x: Tensor, *_same: Tensor, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """Attend over the positions of ``x``, which torchvision also passes as keys and values."""
        return super().forward(x), None


class SplitMLP(nn.Module):
    """torchvision's MLP, with names for the two layers that are split."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up, self.down = mlp[0], mlp[3]

    def forward(self, x: Tensor) -> Tensor:  # (B, T, E) -> (B, T, E)
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def split_heads(model: nn.Module) -> None:
    """Replace a ViT's attention and MLPs by modules that have the same weights and can be split.

    A GPT's can be split as they are.
    """
    encoder: Any = getattr(model, "encoder", None)
    for block in encoder.layers if encoder else ():
        block.self_attention = SplitAttention(block.self_attention)
        block.mlp = SplitMLP(block.mlp)


def num_heads(config: Config) -> int:
    """Return the number of a transformer's attention heads."""
    if config.is_language:
        return config.heads
    return VITS[config.model]["num_heads"] if config.model in VITS else VIT_HEADS
