"""The image has what the trainer needs: it trains from a copy of exactly the copied files."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import deployment_files as files
import pytest

TIMEOUT_S = 600
LITTLE = ["--epochs=1", "--model=transformer", "--image_size=8", "--num_workers=0"]


def entrypoint(folder: Path) -> list[str]:
    """Return what the image runs by default, with a folder in place of / and a smaller model."""
    found = dict(files.instructions())
    words = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    paths = {word: f"{folder}{word}" for word in words if word.startswith("/")}
    python = [sys._base_executable, "-m", "torch.distributed.run"]  # type: ignore[attr-defined]
    programs = {"python": python[:1], "torchrun": python}
    listed = [programs.get(word, [paths.get(word, word)]) for word in words]
    return [*(word for each in listed for word in each), *LITTLE]


def without_roots_rights(command: list[str]) -> list[str]:
    """Return a command that may write only what its user may, even if root runs the tests.

    Another user could not read root's own Python.
    """
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]


@pytest.mark.skipif(sys.platform != "linux", reason="containers run Linux")
def test_the_trainer_trains_with_what_the_image_copies(tmp_path: Path) -> None:
    """The packages are on the path, but not by the environment, which knows this repository."""
    app = tmp_path / "app"
    files.copy_into_image(app)
    subprocess.run(["chmod", "-R", "a-w", str(app)], check=True)
    packages = sysconfig.get_path("purelib")
    own = {"PYTHONPATH": f"{app}:{packages}", "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        without_roots_rights(entrypoint(tmp_path)),
        cwd=app,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **own},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    subprocess.run(["chmod", "-R", "u+w", str(app)], check=True)
    shutil.rmtree(app)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs/digits/result.json").exists()


def test_the_image_has_all_packages_and_nothing_that_only_people_read() -> None:
    names = [Path(name) for name in files.sent()]
    packages = {path.parent.name for path in files.ROOT.glob("*/given.py")}
    assert {"distlab", "solutions", "configs", *packages} <= {name.parts[0] for name in names}
    assert {name.suffix for name in names} <= {
        ".py",
        ".yaml",
        ".yml",
        ".toml",
        ".txt",
        ".sh",
        ".json",
        ".typed",
        "",
    }
