"""What a new user types on the first day, and what the command line makes of it."""

import re
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.cli.app import app

ROOT = Path(__file__).parents[2]
COMMANDS = [
    *([info.name] for info in app.registered_commands),
    *(["bench", name] for name in ("launch", "all_reduce", "sim")),
    ["bench"],
    [],
]


def distlab(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


NEED_THE_COURSE = [
    "",
    "status",
    "check",
    "grade",
    "watch",
    "trace 1.5",
    "hint",
    "diff",
    "reset 1.4",
]


@pytest.mark.parametrize("command", NEED_THE_COURSE)
def test_elsewhere_the_line_says_where_to_go(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert distlab(*command.split()) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.endswith(f"; cd {ROOT}\n")


# Help


@pytest.mark.parametrize("names", [[], ["sim"], ["bench", "launch"]])
def test_help_is_a_command_too(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab(*names, "--help") == 0
    expected = capsys.readouterr().out
    assert distlab("help", *names) == 0
    assert capsys.readouterr().out == expected
    assert f"Usage: {' '.join(['distlab', *names])} " in expected


def test_help_of_what_is_no_command_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("help", "trian") == 2
    line = capsys.readouterr().err
    assert line.startswith("distlab: No such command 'trian'. Did you mean 'train'")
    assert "Valid commands: bench, check" in line


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_no_help_is_cut_on_80_columns(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert distlab(*names, "--help") == 0
    text = capsys.readouterr().out
    assert not re.search(r"\w,?\.\.\.\n", text), "a sentence that ends in the middle"
    assert "[[" not in text, "brackets around brackets"
