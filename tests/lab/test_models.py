"""The models: their shapes and sizes, and the properties that the lessons rely on."""

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distlab.data import ImageShape, load, tokens
from distlab.models import GPT, MODELS, build
from distlab.models.gpt import Attention, build_gpt
from distlab.models.vision import build_cnn, build_resnet18, build_vit, patch_side

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vit"])
@pytest.mark.parametrize("image_shape", [DIGITS, MNIST, CIFAR])
def test_image_models_give_one_row_of_logits_per_image(name: str, image_shape: ImageShape) -> None:
    model = build(name, image_shape=image_shape, num_classes=7)
    assert model(torch.randn(2, *image_shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("builder", "image_shape", "classes"),
    [
        (build_cnn, DIGITS, 10),
        (build_cnn, MNIST, 10),
        (build_cnn, CIFAR, 10),
        (build_resnet18, CIFAR, 10),
        (build_vit, DIGITS, 10),
        (build_gpt, DIGITS, 17),
    ],
)
def test_docstrings_state_the_number_of_parameters(
    builder: type[nn.Module], image_shape: ImageShape, classes: int
) -> None:
    assert f"{parameters(builder(image_shape, classes)):,}" in str(builder.__doc__)


@pytest.mark.parametrize(("name", "classes"), [(n, 17 if n == "gpt" else 10) for n in MODELS])
def test_the_table_of_build_states_the_parameters_for_digits(name: str, classes: int) -> None:
    row = next(line for line in str(build.__doc__).splitlines() if line.split()[:1] == [name])
    model = build(name, image_shape=DIGITS, num_classes=classes)
    assert row.endswith(f" {parameters(model):,}")


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("resnet", "resnet18"), ("CNN", "cnn"), ("vti", "vit")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="cnn, resnet18, vit, gpt") as raised:
        build(wrong, image_shape=DIGITS, num_classes=10)
    assert str(raised.value).endswith(f"Did you mean {nearest!r}?")
    assert "\n" not in str(raised.value)


def test_cnn_and_gpt_on_digits_import_neither_torchvision_nor_sklearn() -> None:
    code = (
        "import sys; from distlab import data, models\n"
        "splits = data.load('digits')\n"
        "models.build('cnn', image_shape=splits.image_shape, num_classes=10)\n"
        "models.build('gpt', image_shape=splits.image_shape, num_classes=17)\n"
        "print([m for m in ('torchvision', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[]", done.stderr


def test_cnn_reads_digits() -> None:
    splits = load("digits")
    model = build("cnn", image_shape=splits.image_shape, num_classes=splits.num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(8):
        for images, labels in DataLoader(splits.train, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    images, labels = next(iter(DataLoader(splits.test, batch_size=len(splits.test))))
    assert (model(images).argmax(1) == labels).float().mean() >= 0.975


def test_cnn_gradients_of_two_halves_average_to_that_of_the_whole() -> None:
    model = build("cnn", image_shape=CIFAR, num_classes=10)
    images, labels = torch.randn(8, *CIFAR), torch.arange(8)

    def gradients(part: slice) -> Tensor:
        loss = F.cross_entropy(model(images[part]), labels[part])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])

    halves = (gradients(slice(0, 4)) + gradients(slice(4, 8))) / 2
    torch.testing.assert_close(halves, gradients(slice(0, 8)), rtol=1e-4, atol=1e-6)


def test_cnn_takes_oblong_images_and_refuses_tiny_ones() -> None:
    assert build_cnn((3, 20, 40), 5)(torch.randn(1, 3, 20, 40)).shape == (1, 5)
    with pytest.raises(ValueError, match="at least 4 x 4, got 3 x 8"):
        build_cnn((1, 3, 8), 10)


def test_resnet_keeps_small_images_whole_and_shrinks_large_ones() -> None:
    small = build_resnet18(CIFAR, 10).get_submodule("conv1")
    large = build_resnet18((3, 224, 224), 10).get_submodule("conv1")
    assert (small.stride, large.stride) == ((1, 1), (2, 2))


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 4), (32, 4), (224, 14), (7, 1)])
def test_vit_patches_divide_the_image(side: int, patch: int) -> None:
    assert patch_side(side) == patch


def test_vit_refuses_oblong_images() -> None:
    with pytest.raises(ValueError, match="square images, got 8 x 12"):
        build_vit((1, 8, 12), 10)


def test_gpt_sees_no_token_before_its_time() -> None:
    model = GPT(vocab_size=11, context=9)
    before = torch.randint(11, (2, 9))
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % 11
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 5 + [True] * 4


def test_gpt_takes_shorter_sequences_and_refuses_longer_ones() -> None:
    model = GPT(vocab_size=11, context=9)
    sequence = torch.randint(11, (1, 9))
    torch.testing.assert_close(model(sequence[:, :4]), model(sequence)[:, :4])
    with pytest.raises(ValueError, match="up to 9 tokens, got 10"):
        model(torch.zeros(1, 10, dtype=torch.int64))


@pytest.mark.parametrize(("width", "layers", "heads"), [(64, 4, 4), (32, 1, 2), (48, 3, 6)])
def test_gpt_has_as_many_parameters_as_its_formula_says(
    width: int, layers: int, heads: int
) -> None:
    vocab, context = 17, 63
    model = GPT(vocab, context, width=width, layers=layers, heads=heads)
    ends = (vocab + context + 2) * width
    assert parameters(model) == ends + layers * (12 * width**2 + 13 * width)


def test_gpt_ties_the_head_to_the_embedding() -> None:
    model = GPT(vocab_size=11, context=9)
    assert model.head.weight is model.embedding.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_gpt_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width 64 and heads 5"):
        GPT(11, 9, heads=5)


def test_gpt_attention_computes_the_heads_that_it_holds_weights_of() -> None:
    whole = Attention(width=32, heads=4)
    x = torch.randn(2, 5, 32)
    parts = [half_of(whole, slice(0, 16)), half_of(whole, slice(16, 32))]
    together = parts[0](x) + parts[1](x) - whole.out.bias  # both halves added the bias
    torch.testing.assert_close(together, whole(x))


def half_of(whole: Attention, part: slice) -> Attention:
    """Return the attention of the heads in ``part``, as a tensor-parallel rank would hold it."""
    half = Attention(width=32, heads=4)
    half.load_state_dict(whole.state_dict())
    for layer in (half.query, half.key, half.value):
        layer.weight = nn.Parameter(layer.weight[part])
        layer.bias = nn.Parameter(layer.bias[part])
    half.out.weight = nn.Parameter(half.out.weight[:, part])
    return half


def test_gpt_starts_indifferent() -> None:
    model = GPT(vocab_size=17, context=63)
    sequences, targets = torch.randint(17, (2, 8, 63))
    loss = F.cross_entropy(model(sequences).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(17), abs=0.1)


def test_gpt_learns_the_digits() -> None:
    splits = tokens(load("digits"))
    model = build("gpt", image_shape=splits.image_shape, num_classes=splits.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _, (inputs, targets) in zip(
        range(12), DataLoader(splits.train, batch_size=64), strict=False
    ):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
