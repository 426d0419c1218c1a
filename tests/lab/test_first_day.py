"""Right and wrong commands that a new user types on the first day."""

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, distlab

from distlab import training
from distlab.launch import output


@pytest.mark.parametrize(
    "command", ["", "status", "check", "grade", "watch", "trace 1.5", "reset 1.4"]
)
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


# Training


def test_a_loss_that_is_no_number_ends_the_training(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["--lr", "1e9", "--num-workers", "2", "--backend", "sim"]
    assert distlab("train", *options) == 1
    printed = capfd.readouterr()
    assert len(printed.out.splitlines()) == 1, "no epoch is reported"
    assert re.fullmatch(
        r"step [1-9]: the loss is (nan|inf), which is not a finite number any more "
        r"\(first seen on all 2 ranks\). Try a smaller --lr than 1e\+09, say 0.05\n",
        printed.err,
    )


def test_a_last_step_that_goes_too_far_is_seen_in_the_test(
    capfd: pytest.CaptureFixture[str],
) -> None:
    one_step = ["--epochs", "1", "--batch-size", "1436", "--num-workers", "1", "--lr", "1e30"]
    assert distlab("train", *one_step, "--backend", "sim") == 1
    assert capfd.readouterr().err.startswith("step 1: the loss is nan, ")


def test_the_rank_where_the_loss_left_the_numbers_is_named() -> None:
    config = training.make_config(dataset="digits", model="cnn", epochs=1, num_workers=2, lr=0.01)
    answers = [training.Diverged(7, math.inf, is_mine) for is_mine in (False, True)]
    line = training._how_it_diverged(config, answers)
    assert line.startswith("step 7: the loss is inf")
    assert "first seen on rank 1)" in line
    assert line.endswith("Try a smaller --lr than 0.01, say 0.001")


# Many workers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ranks_are_counted_while_a_long_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(output, "QUIET_S", 0.0)
    display = output.Display(3)
    display.show(2, 1)
    display.close()
    display.show(3, 3)
    erase = "\r\x1b[K"
    line = "starting 3 ranks: 2 have a process, 1 have joined the group"
    assert sys.stderr.getvalue() == f"{erase}{line}{erase}"


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_the_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("completion", shell) == 0
    assert f"_DISTLAB_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_bash_is_offered_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert distlab("completion", "bash") == 0
    ask = (
        f"{capsys.readouterr().out}\nCOMP_WORDS=(distlab check 1.4 bro); COMP_CWORD=3; "
        '_distlab_completion distlab; echo "${COMPREPLY[@]}"'
    )
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": beside}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.stdout.split() == ["broadcast", "broadcast_parameters"]
