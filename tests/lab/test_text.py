"""Parts of messages: ranks, times, sizes, and suggestions for unknown names."""

from collections.abc import Iterable

import pytest

from distlab.util.text import (
    bytes_text,
    clipped,
    did_you_mean,
    rank_names,
    seconds_text,
    told_apart,
    without_repeats,
)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([4, 0, 1, 2], "ranks 0-2 and 4"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
        (range(0, 256, 2), "ranks 0, 2, 4, …, 254 (128 ranks)"),
        ([*range(100), 200, 300], "ranks 0-99, 200 and 300"),
    ],
)
def test_ranks_are_named_shortly(ranks: Iterable[int], words: str) -> None:
    assert rank_names(ranks) == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-8, "25.0 ns"),
        (9.999e-7, "1.00 µs"),
        (3.84e-5, "38.4 µs"),
        (0.000_999_9, "1.00 ms"),
        (0.1234, "123 ms"),
        (1, "1.00 s"),
        (5000, "5000 s"),
    ],
)
def test_times_have_three_digits_and_a_fitting_unit(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1.00 KiB"),
        (6 << 20, "6.00 MiB"),
        (80 << 30, "80.0 GiB"),
    ],
)
def test_sizes_have_binary_units(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [("digit", "Did you mean 'digits'?"), ("cifar10", "Did you mean 'CIFAR10'?"), ("resnet", "")],
)
def test_a_wrong_name_is_answered_with_the_one_it_is_like(wrong: str, answer: str) -> None:
    assert did_you_mean(wrong, ["digits", "CIFAR10"]) == answer


def test_a_warning_that_a_program_repeats_is_shown_once() -> None:
    old, new = (
        f"/torch/{name}.py:83: FutureWarning: `{name}` is deprecated.\n  return func()\n"
        for name in ("gather", "scatter")
    )
    elsewhere = old.replace("83", "90").replace("func", "other")
    output = f"step 1\n{old}step 2\n{new}{old}  step 3\n{elsewhere}{new}"
    assert without_repeats(output) == f"step 1\n{old}step 2\n{new}  step 3\n"
    assert (
        without_repeats("loss 3: Warning: 3\nloss 3: Warning: 3")
        == "loss 3: Warning: 3\nloss 3: Warning: 3"
    )


def test_a_line_is_shortened_in_its_paths_before_its_reason() -> None:
    line = "raised OSError: /home/learner/course/phase4/step-3.pt: the file is damaged"
    assert clipped(line, len(line)) == line
    assert clipped(line, 60) == "raised OSError: …/step-3.pt: the file is damaged"
    assert clipped("raised OSError: it is damaged", 20) == "raised OS…is damaged"


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ([0.25, 3], ["0.25", "3"]),
        ([0.0115012, 0.0115034], ["0.011501", "0.011503"]),
        ([0.1, 0.1], ["0.1", "0.1"]),
        ([float("nan"), float("nan")], ["nan", "nan"]),
    ],
)
def test_numbers_get_the_digits_that_tell_them_apart(
    numbers: list[float], texts: list[str]
) -> None:
    assert told_apart(numbers, 3) == texts
