"""The image has what the trainer needs: it trains from a copy of exactly the copied files."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import deployment_files as files
import pytest
from processes import MARK, marked, wait_until

TIMEOUT_S = 600
LITTLE = ["--epochs=100", "--model=transformer", "--image_size=8", "--num_workers=1"]


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
def test_the_trainer_trains_and_saves_with_what_the_image_copies(tmp_path: Path, mark: str) -> None:
    """SIGTERM reaches all processes of a rank, of which one loads images.

    The packages are on the path, but not by the environment, which knows this repository.
    """
    app = tmp_path / "app"
    files.copy_into_image(app)
    subprocess.run(["chmod", "-R", "a-w", str(app)], check=True)
    packages = sysconfig.get_path("purelib")
    own = {"PYTHONPATH": f"{app}:{packages}", "HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    run_dir = tmp_path / "runs/digits"
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            without_roots_rights(entrypoint(tmp_path)),
            cwd=app,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", MARK: mark, **own},
            stdout=log,
            stderr=log,
        )
        metrics = run_dir / "metrics.rank0.jsonl"
        wait_until(lambda: process.poll() is not None or "loss" in _text(metrics))
        wait_until(lambda: process.poll() is not None or _is_alive(app, run_dir, "--started"))
        assert _is_alive(app, run_dir)
        process.send_signal(signal.SIGTERM)
        code = process.wait(TIMEOUT_S)
        subprocess.run(["chmod", "-R", "u+w", str(app)], check=True)
        shutil.rmtree(app)
        assert code == 75, log.seek(0) or log.read()
    assert list(run_dir.glob("checkpoints/step-*"))
    wait_until(lambda: marked(mark) == [])  # workers notice within seconds that their rank ended


def _is_alive(app: Path, run_dir: Path, *options: str) -> bool:
    """Ask the image's probe."""
    probe = app / files.DEPLOYMENT.relative_to(files.ROOT) / "liveness.py"
    command = [sys.executable, str(probe), str(run_dir), "300", *options]
    return subprocess.run(command, env={**os.environ, "TMPDIR": str(run_dir)}).returncode == 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_the_image_has_all_packages_and_nothing_that_only_people_read() -> None:
    names = [Path(name) for name in files.sent()]
    packages = {path.parent.name for path in files.ROOT.glob("*/given.py")}
    assert {"distlab", "solutions", "configs", *packages} <= {name.parts[0] for name in names}
    texts = {path.relative_to(files.ROOT) for path in files.ROOT.glob("phase*/guidelines.md")}
    assert {name for name in names if name.suffix == ".md"} == texts  # data: text reads them
    assert {name.suffix for name in names} <= {
        ".md",
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
