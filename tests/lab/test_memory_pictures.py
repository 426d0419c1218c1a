"""The pictures of memory, and the numbers beside them, are those of a fresh computation."""

import importlib
import io
import re
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from distlab.models.gpt import GPT

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("figures")


def section(folder: str, heading: str) -> str:
    guide = (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")
    return guide.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def words(svg: str) -> list[str]:
    """Return the texts in a picture."""
    return re.findall(r">([^<>\n]+)</(?:text|tspan)>", svg)


def words_of(figure: Figure) -> list[str]:
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    return words(file.getvalue())


def held_gb(figures: ModuleType, way: str) -> dict[str, float]:
    picture = figures.memory_picture
    return picture.parts_gb(picture.WAYS[way])


def test_the_picture_of_a_gpu_is_current(figures: ModuleType) -> None:
    figure = figures.WHERE_MEMORY_GOES
    drawn, wanted = words(figure.path.read_text(encoding="utf-8")), words_of(figure.picture())
    assert drawn == wanted, "python scripts/figures.py where_memory_goes draws it again"
    (peak,) = (word for word in wanted if re.fullmatch(r"\d\.\d\d GB", word))
    text = section("phase2_advanced", "Where the memory goes")
    assert f"memory rises to {peak}" in text


def test_the_bars_end_at_their_totals_and_three_of_them_fit(figures: ModuleType) -> None:
    drawn = words(figures.WHERE_MEMORY_GOES.path.read_text(encoding="utf-8"))
    ways = figures.memory_picture.WAYS
    totals = {way: sum(held_gb(figures, way).values()) for way in ways}
    assert {f"{total:.0f}" for total in totals.values()} <= set(drawn)
    fit = [way for way, total in totals.items() if total <= figures.memory_picture.GPU_GB]
    assert fit == ["ZeRO 3", "tensor\nparallel", "ZeRO 1 and\ncheckpointing"]


def test_the_worked_example_of_memory_follows_from_the_formulas(figures: ModuleType) -> None:
    text = section("phase2_advanced", "Where the memory goes")
    model, parts = figures.memory_picture.MODEL, held_gb(figures, "plain")
    s, h = model.length, model.width
    states = parts["parameters"] + parts["gradients"] + parts["optimizer state"]
    linear, scores = 34 * s * h, 5 * model.heads * s**2
    logits_gb = 4 * s * model.vocabulary / 1e9
    kept_gb = parts["activations"] - logits_gb
    assert kept_gb == pytest.approx(model.layers * linear / 1e9)
    scores_gb = parts["attention's scores"]
    assert scores_gb == pytest.approx(model.layers * scores / 1e9)
    assert f"Ψ = {states / 16:.2f} billion" in text
    assert f"16Ψ = **{states:.1f} GB**" in text
    assert f"adds {linear / 1e6:.0f} + {scores / 1e6:.0f} MB" in text.replace("\n", " ")
    assert f"**{kept_gb + scores_gb:.1f} GB** in all" in text
    assert f"to {kept_gb:.1f} GB" in text


def test_the_measured_gpt_has_as_many_parameters_as_the_text_says() -> None:
    model = GPT(8192, 1024, width=1024, layers=8, heads=16)
    millions = sum(param.numel() for param in model.parameters()) / 1e6
    assert f"a GPT with {millions:.0f} million" in section(
        "phase2_advanced", "Where the memory goes"
    ).replace("\n", " ")


def test_the_picture_of_zero_is_what_the_ranks_hold(figures: ModuleType) -> None:
    stages = figures.ZERO.stages()
    drawn = words(figures.ZERO.path.read_text(encoding="utf-8"))
    wanted = words_of(figures.zero_picture.picture(stages))
    assert drawn == wanted, "python scripts/figures.py zero_stages draws it again"
    held = [{kind: [n > 0 for n in part] for kind, part in ranks[2].items()} for ranks in stages]
    everything, third = [True] * 4, [False, False, True, False]
    kinds = ["parameters", "gradients", "optimizer state"]
    assert held == [
        {kind: everything if number < 3 - stage else third for number, kind in enumerate(kinds)}
        for stage in range(4)
    ]


def test_the_table_of_zero_follows_from_the_formulas(figures: ModuleType) -> None:
    text = section("phase3_multi_node", "The stages of ZeRO")
    rows = re.findall(r"^\| (\d) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    measured = [sum(sum(part) for part in ranks[0].values()) for ranks in figures.ZERO.stages()]
    assert [float(of_four) for _, _, of_four, _ in rows] == measured
    for _, formula, of_four, of_64 in rows:
        first, _, divided = formula.rpartition(" + ")
        whole = float(divided.removesuffix("/N"))
        for ranks, quoted in ((4, of_four), (64, of_64)):
            share = whole / ranks if "/N" in divided else whole
            assert f"{float(first or 0) + share:.3g}" == quoted


def test_letters_that_are_drawn_as_shapes_keep_their_size(figures: ModuleType) -> None:
    picture = Figure(figsize=(2, 1))
    picture.text(0.1234567, 0.5, "rank")
    drawn = figures._svg_of(picture)
    assert re.findall(r'scale\(([^)]*)\)"/>\n', drawn)[:1] == ["0.015625"]
    assert "1234567" not in drawn
