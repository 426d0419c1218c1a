"""Install what the course lacks on a host that has torch, and keep that torch.

    python3 scripts/install_beside_torch.py

For notebooks in a cloud, images with torch, and modules of a cluster. pip installs only what is
missing. The installed versions of torch and torchvision are its constraints, so that no other
build, which would be several GB, replaces them.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
KEPT = ("torch", "torchvision")
TOOLS = ("pytest>=8.2", "ipyparallel>=9.0")  # for the suites, and for the cells on real ranks


def dependencies() -> list[str]:
    """Return the dependencies in pyproject.toml, such as "torch>=2.11"."""
    text = PROJECT.read_text(encoding="utf-8")  # Python 3.10 has no parser for it
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'^  "([^"]+)"', block, re.MULTILINE)


def kept_versions() -> dict[str, str]:
    """Return the versions of torch and torchvision.

    Raises:
        SystemExit: torch is missing, or older than the course needs.
    """
    found = {}
    for name in KEPT:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    (oldest,) = (line for line in dependencies() if line.startswith("torch>="))
    instead = "`make gpu` installs its own, of about 5 GB, in .venv."
    if "torch" not in found:
        raise SystemExit(f"{sys.executable} has no torch to keep. {instead}")
    if release(found["torch"]) < release(oldest):
        raise SystemExit(
            f"torch {found['torch']} stays as it is, but the course needs {oldest}. Choose a newer "
            f"image or environment on this host. Otherwise, {instead}"
        )
    return found


def release(text: str) -> tuple[int, ...]:
    """Return a version's first numbers: (2, 11) for "torch>=2.11" and for "2.11.0+cu128"."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def install(kept: Mapping[str, str]) -> None:
    """Install what is missing.

    Args:
        kept: Versions that must not change, by name.

    Raises:
        SystemExit: pip failed, for example because something else needs another torch.
    """
    needed = [line for line in dependencies() if re.split("[>;]", line)[0] not in kept]
    pins = "".join(f"{name}=={version}\n" for name, version in kept.items())
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(pins)
        constraints.flush()
        options = ["--quiet", "--constraint", constraints.name]
        command = [sys.executable, "-m", "pip", "install", *options, *needed, *TOOLS]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"pip could not install what is missing:\n{done.stderr}")


def main() -> None:
    """Install what is missing, and name what stayed."""
    kept = kept_versions()
    install(kept)
    stayed = " and ".join(f"{name} {version}" for name, version in kept.items())
    print(f"The course has all that it needs, beside the host's {stayed}.")


if __name__ == "__main__":
    main()
