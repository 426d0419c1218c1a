"""Right and wrong commands that a new user types on the first day."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, distlab

from distlab.launch import output


@pytest.mark.parametrize(
    "command", ["", "status", "check", "grade", "watch", "trace 1.4", "reset 1.3"]
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
        f"{capsys.readouterr().out}\nCOMP_WORDS=(distlab check 1.3 bro); COMP_CWORD=3; "
        '_distlab_completion distlab; echo "${COMPREPLY[@]}"'
    )
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": beside}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.stdout.split() == ["broadcast", "broadcast_parameters"]
