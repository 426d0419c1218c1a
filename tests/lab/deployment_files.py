"""Helpers that read the deployment files and the commands in them."""

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch.distributed.run import get_args_parser

from distlab.production.config import split_arguments

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "solutions/phase4_production/deployment"
IN_IMAGE = "/app/solutions/phase4_production/deployment"
MODULE = "solutions.phase4_production.imagenet_trainer"

Document = dict[str, Any]


class Command(NamedTuple):
    """A command that starts the trainer."""

    launcher: argparse.Namespace  # torchrun's options, parsed as torchrun does
    trainer: dict[str, str]  # the trainer's options and their values


def documents(name: str) -> list[Document]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOYMENT / name).read_text(encoding="utf-8")))


def of_kind(name: str, kind: str) -> Document:
    """Return the file's only document of this kind."""
    [found] = [document for document in documents(name) if document["kind"] == kind]
    return found


def sent() -> list[str]:
    """Return the files that .dockerignore lets through, relative to the root."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    keep = [line.removeprefix("!") for line in patterns if line.startswith("!")]
    tops = [path for pattern in keep for path in ROOT.glob(pattern)]  # the first pattern is "*"
    files = [each for top in tops for each in [top, *top.rglob("*")] if each.is_file()]
    names = [each.relative_to(ROOT).as_posix() for each in files]
    return [name for name in names if not _ignored(name, patterns)]


def _ignored(name: str, patterns: list[str]) -> bool:
    """Return whether the last pattern that a file or a folder above it matches leaves it out."""
    fits = [each for each in patterns if re.fullmatch(_as_regex(each.removeprefix("!")), name)]
    return not fits[-1].startswith("!")


def _as_regex(pattern: str) -> str:
    """Translate a pattern in which ** stands for folders, and * for any part of one name."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    known = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return "".join(known.get(part, re.escape(part)) for part in parts) + "(?:/.*)?"


def copy_into_image(folder: Path) -> None:
    """Copy what the Dockerfile's COPY lines copy, as far as .dockerignore sends it."""
    names = sent()
    for _, rest in (each for each in instructions() if each[0] == "COPY"):
        *sources, target = rest.split()
        for source in sources:
            whole = (ROOT / source).is_dir()
            for name in [each for each in names if Path(each).is_relative_to(source)]:
                end = Path(name).relative_to(source) if whole else Path(name).name
                (folder / target / end).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / target / end)


def services() -> dict[str, Document]:
    """Return the services of docker-compose.yaml."""
    [compose] = documents("docker-compose.yaml")
    found: dict[str, Document] = compose["services"]
    return found


def trainers() -> dict[str, Document]:
    """Return the services that run the trainer."""
    return {
        name: each for name, each in services().items() if "torchrun" in each.get("command", [])
    }


def jobs() -> dict[str, Document]:
    """Return the specs of the Kubernetes Jobs, by file."""
    names = ("kubernetes.yaml", "kubernetes-elastic.yaml")
    return {name: of_kind(name, "Job")["spec"] for name in names}


def data_job() -> Document:
    """Return the spec of the Job that fills the volume of the data."""
    found: Document = of_kind("kubernetes-data.yaml", "Job")["spec"]
    return found


def with_rdma() -> list[Document]:
    """Return the documents of kubernetes.yaml as kustomization.yaml patches them."""
    [overlay] = documents("kustomization.yaml")
    found = [document for name in overlay["resources"] for document in documents(name)]
    for patch in overlay["patches"]:
        named = [each for each in found if _is_target(each, patch["target"])]
        assert len(named) == 1, patch["target"]
        for change in yaml.safe_load(patch["patch"]):
            _apply(named[0], change)
    return found


def _is_target(document: Document, target: dict[str, str]) -> bool:
    return {"kind": document["kind"], "name": document["metadata"]["name"]} == target


def _apply(document: Document, change: Document) -> None:
    """Apply one change of a JSON patch, which adds a key or an element, or replaces a key."""
    keys = [key.replace("~1", "/") for key in change["path"].split("/")[1:]]
    place: Any = document
    for key in keys[:-1]:
        place = place[int(key) if isinstance(place, list) else key]
    if isinstance(place, list):
        assert (keys[-1], change["op"]) == ("-", "add"), change
        place.append(change["value"])
    else:
        assert (keys[-1] in place) == (change["op"] == "replace"), change
        place[keys[-1]] = change["value"]


def pods() -> dict[str, Document]:
    """Return the Pod specs, by file."""
    found = {name: job["template"]["spec"] for name, job in jobs().items()}
    [patch] = of_kind("trainjob.yaml", "TrainJob")["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return {**found, "trainjob.yaml": job["template"]["spec"]["template"]["spec"]}


def words() -> dict[str, list[str]]:
    """Return the arguments that the entrypoint gets, by file or service."""
    found = {f"compose {name}": service["command"] for name, service in trainers().items()}
    for name, job in jobs().items():
        found[name] = job["template"]["spec"]["containers"][0]["args"]
    found["trainjob.yaml"] = of_kind("trainjob.yaml", "TrainJob")["spec"]["trainer"]["args"]
    [sky] = documents("skypilot.yaml")
    for name, script in (("slurm.sh", read("slurm.sh")), ("skypilot.yaml", sky["run"])):
        found[name] = _after_entrypoint(script)
    found["Dockerfile"] = json.loads(instructions()[-1][1])
    return found


def commands() -> dict[str, Command]:
    """Return the parsed command that starts the trainer, by file or service."""
    return {name: _command(each) for name, each in words().items()}


def read(name: str) -> str:
    """Return the text of a deployment file."""
    return (DEPLOYMENT / name).read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions as pairs of a keyword, such as USER, and its text."""
    lines = [line for line in read("Dockerfile").splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole if line)]


def _after_entrypoint(script: str) -> list[str]:
    """Return the entrypoint's arguments in a shell script, without expanding variables."""
    [line] = [line for line in _joined(script) if "entrypoint.py" in line]
    line = line.partition(" || ")[0]
    return shlex.split(line[line.index("torchrun") :])


def _joined(script: str) -> Iterator[str]:
    yield from script.replace("\\\n", " ").splitlines()


def _command(command: list[str]) -> Command:
    assert command[0] == "torchrun", command
    launcher = get_args_parser().parse_args(command[1:])
    assert launcher.module, command
    assert launcher.training_script == MODULE, command
    return Command(launcher, split_arguments(launcher.training_script_args))
