"""The deployment manifests are valid, and agree with the trainer."""

import copy
import shutil
import subprocess
from typing import Any

import deployment_files as files
import kubernetes_validate
import pytest
import yaml
from deployment_files import DEPLOYMENT, ROOT, Command, Document
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from distlab.production import errors
from distlab.production.config import Config, make_config
from solutions.phase4_production.deployment import entrypoint

RENDEZVOUS_PORT = 29400
METRICS_PORT = 9400
RANKS_OF_A_NODE = 8  # at most; each needs a port for its metrics
SILENT_S = 600  # a rank that is silent for longer counts as hung

COMMANDS = files.commands()
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
each_job = pytest.mark.parametrize("job", files.jobs().values(), ids=files.jobs())

# --- schemas -------------------------------------------------------------------------------------

MANIFESTS = [
    pytest.param(document, id=f"{name} {document['kind']} {document['metadata']['name']}")
    for name in ("kubernetes.yaml", "kubernetes-elastic.yaml")
    for document in files.documents(name)
]


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("document", MANIFESTS)
def test_kubernetes_would_accept_it(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def understood(document: Document) -> Document:
    """Return the part of a TrainJob that Kubeflow's models keep; they drop unknown keys."""
    model: Any = TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document))
    return model.to_dict()  # type: ignore[no-any-return]


def test_kubeflow_would_understand_all_of_the_trainjob() -> None:
    document = files.of_kind("trainjob.yaml", "TrainJob")
    assert understood(document) == document


def test_docker_compose_accepts_the_file() -> None:
    compose = docker_compose()
    profiles = [f"--profile={name}" for name in ("cpu", "gpu", "monitoring")]
    command = [*compose, "--file", str(DEPLOYMENT / "docker-compose.yaml"), *profiles, "config"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(yaml.safe_load(ended.stdout)["services"]) == set(files.services())


def docker_compose() -> list[str]:
    """Return the Docker Compose command; skip the test if there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        version = [*command, "version", "--short"]
        if shutil.which(command[0]) and not subprocess.run(version, capture_output=True).returncode:
            return command
    pytest.skip("neither docker compose nor docker-compose is installed")


# --- the trainer's command line ------------------------------------------------------------------


@each_command
def test_each_flag_is_a_key_of_the_configuration(command: Command) -> None:
    assert command.trainer.keys() - {"config", "impl"} <= Config.model_fields.keys()


@each_command
def test_each_value_is_right(command: Command) -> None:
    known = {k: v for k, v in command.trainer.items() if k != "config" and "$" not in v}
    make_config({key: yaml.safe_load(text) for key, text in known.items()}, "the command")
    if "$" not in command.trainer["config"]:
        assert (ROOT / command.trainer["config"]).is_file()


@pytest.mark.parametrize("words", files.words().values(), ids=files.words())
def test_flags_and_values_are_words_of_their_own(words: list[str]) -> None:
    """The entrypoint and the probe look for --run_dir and its value, not for --run_dir=DIR."""
    assert "--run_dir" in words[:-1]


@each_command
def test_metrics_reach_others_only_where_a_network_keeps_strangers_out(command: Command) -> None:
    host = command.trainer.get("metrics_host", Config.model_fields["metrics_host"].default)
    names = {name for name, each in COMMANDS.items() if each is command}
    in_a_network = names & {"slurm.sh", "skypilot.yaml", "Dockerfile"} == set()
    assert host == ("0.0.0.0" if in_a_network else "127.0.0.1")


# --- probes and exit codes -----------------------------------------------------------------------


def probes() -> dict[str, tuple[str, list[str]]]:
    """Return the trainer's run directory and a probe's command, by file or service."""
    found = {}
    for name, service in files.trainers().items():
        command = COMMANDS[f"compose {name}"]
        found[f"compose {name}"] = command.trainer["run_dir"], service["healthcheck"]["test"][1:]
    for name, job in files.jobs().items():
        [container] = job["template"]["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe"):
            run = container[probe]["exec"]["command"]
            found[f"{name} {probe}"] = COMMANDS[name].trainer["run_dir"], run
    return found


@pytest.mark.parametrize(("run_dir", "command"), probes().values(), ids=probes())
def test_probes_look_at_the_run_and_come_after_the_trainers_own_watch(
    run_dir: str, command: list[str]
) -> None:
    program, folder, age_s, *rest = command[1:]
    assert program == f"{files.IN_IMAGE}/liveness.py"
    assert folder == run_dir
    assert float(age_s) == SILENT_S > Config.model_fields["heartbeat_timeout_s"].default
    assert rest in ([], ["--started"])


@each_job
def test_exit_codes_decide_what_kubernetes_does(job: Document) -> None:
    """Kubernetes applies the first rule that matches."""
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [
        ("FailJob", [errors.EXIT_WRONG]),
        ("Ignore", None),  # for disruptions of the Pod
        ("Ignore", [errors.EXIT_STOPPED]),
        ("Count", [1, errors.EXIT_CANNOT_SAVE]),
    ]
    assert {
        rule["onExitCodes"]["containerName"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    } == {job["template"]["spec"]["containers"][0]["name"]}
    assert entrypoint.STOPPED == errors.EXIT_STOPPED


# --- how nodes find each other -------------------------------------------------------------------


@pytest.mark.parametrize("name", files.jobs())
def test_pods_meet_at_index_0(name: str) -> None:
    job, service = files.of_kind(name, "Job"), files.of_kind(name, "Service")
    own, job_name = service["metadata"]["name"], job["metadata"]["name"]
    launcher, spec = COMMANDS[name].launcher, job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["subdomain"] == own
    assert launcher.rdzv_endpoint == f"{job_name}-0.{own}:{RENDEZVOUS_PORT}"
    assert launcher.rdzv_backend == "c10d"
    assert spec["completions"] == spec["parallelism"] == int(launcher.nnodes.rpartition(":")[2])
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        *("None", True),
    )
