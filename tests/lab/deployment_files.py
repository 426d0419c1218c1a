"""Helpers that read the deployment files and the commands in them."""

import argparse
import json
import re
import shlex
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
