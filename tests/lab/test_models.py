"""The models: their shapes, and the properties that the lessons rely on."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from distlab.data import ImageShape, load
from distlab.models import build
from distlab.models.gpt import GPT, Attention
from distlab.torchvision_repair import import_torchvision

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
    ("wrong", "nearest"), [("resnet", "resnet18"), ("CNN", "cnn"), ("vti", "vit")]
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="cnn, resnet18, vit") as raised:
        build(wrong, image_shape=DIGITS, num_classes=10)
    assert str(raised.value).endswith(f"Did you mean {nearest!r}?")
    assert "\n" not in str(raised.value)


def test_cnn_on_digits_imports_neither_torchvision_nor_sklearn() -> None:
    code = (
        "import sys; from distlab import data, models\n"
        "splits = data.load('digits')\n"
        "models.build('cnn', image_shape=splits.image_shape, num_classes=10)\n"
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


def test_resnet_draws_the_first_layer_for_large_images_last() -> None:
    model = build("resnet18", image_shape=(3, 72, 72), num_classes=7)
    torch.manual_seed(0)
    import_torchvision().models.resnet18(num_classes=7)
    first = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    assert torch.equal(model.get_parameter("conv1.weight"), first.weight)


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
