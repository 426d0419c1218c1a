"""``distlab plan``, its models, and the page on its accuracy."""

import re
import runpy
from pathlib import Path

import pytest
from commands import distlab

from distlab import planning

ROOT = Path(__file__).parents[2]
FIDELITY = runpy.run_path(str(ROOT / "benchmarks/plan_fidelity.py"))
PAGE = (ROOT / "docs/plan_fidelity.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "phase3_multi_node/guidelines.md").read_text(encoding="utf-8")
MAX_MEAN_ERROR = 0.12
BILLIONS = {  # published sizes of GPTs, in billions of parameters
    "gpt3-175b": 174.6,
    "megatron-22b": 22.0,
    "megatron-145b": 145.6,
    "megatron-530b": 529.6,
    "gpt-1t": 1008.0,
}


def rows_of(printed: str) -> list[str]:
    return re.findall(r"^ *\d+·\d+·\d+ .*", printed, re.MULTILINE)


def test_gpt3_on_a_thousand_gpus_is_planned(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = "plan --model gpt3-175b --cluster dgx-a100 --nodes 128 --batch 1536"
    assert distlab(*line.split()) == 0
    printed = capfd.readouterr().out
    assert "gpt3-175b on 1,024 GPUs of dgx-a100" in printed
    assert "docs/plan_fidelity.md" in printed.splitlines()[-1]
    rows = [" ".join(row.split()) for row in rows_of(printed)]
    assert len(rows) == 8
    quoted = GUIDE.partition(f"$ distlab {line}\n")[2].partition("```")[0]
    assert [" ".join(row.split()) for row in rows_of(quoted)] == rows[:4]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--model gpt3", "unknown model 'gpt3'; valid: "),
        ("--cluster dgx-a10", "Did you mean 'dgx-a100'?"),
        ("--cluster laptop", "laptop has no GPUs to plan for"),
        ("--model gpt-1t --nodes 1", "the smallest need is "),
        ("--nodes 7 --batch 5", "56 GPUs cannot share the model and batches of 5 sequences"),
    ],
)
def test_what_cannot_be_planned_gets_one_line(
    options: str, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert distlab("plan", *options.split()) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("distlab plan: ")
    assert printed.err.count("\n") == 1
    assert part in printed.err


def test_a_model_that_is_no_gpt_is_planned_as_one_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert distlab("plan", "--model", "llama-2-7b", "--nodes", "1", "--batch", "64") == 0
    assert "counted as a GPT of its layers and width" in capfd.readouterr().out


def test_known_models_have_their_published_sizes() -> None:
    given = planning.load("solution").given
    lesson = planning.load("solution").lesson
    for name, billions in BILLIONS.items():
        model = given.Transformer(*planning.shape_of(name)[:5])
        assert lesson.parameters_per_rank(model, given.Layout()) / 1e9 == pytest.approx(
            billions, rel=0.005
        )


def test_predictions_are_close_to_published_steps_also_where_nothing_was_fitted() -> None:
    every = FIDELITY["rows"]()
    constants = planning.MATMUL_EFFICIENCY, planning.MATMUL_PADDING
    for half in ("fitted", "checked"):
        some = FIDELITY["of_half"](every, half)
        average, worst = FIDELITY["mean_error"](some, *constants), max(some, key=error_of)
        assert len(some) == 9
        assert average < MAX_MEAN_ERROR
        assert f"| {half} | 9 | {average:.1%} | {worst.error():+.1%} |" in PAGE


def error_of(row: object) -> float:
    error: float = abs(row.error())  # type: ignore[attr-defined]
    return error


def test_the_tables_of_the_page_are_todays() -> None:
    assert PAGE.partition(FIDELITY["MARK"])[2].strip() == FIDELITY["tables"]()
