"""The manifests of the deployment: valid, restricted, and of one mind with the trainer."""

import copy
import re
import shutil
import subprocess
from typing import Any

import deployment_files as files
import kubernetes_validate
import pytest
import test_docs
import yaml
from deployment_files import DEPLOYMENT, ROOT, Command, Document
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from distlab.production import errors
from distlab.production.config import Config, make_config
from solutions.phase4_production.deployment import entrypoint

# What all of them must agree on.
IMAGES = {"distlab-trainer:0.1.0", "distlab-trainer:0.1.0-cuda"}
RENDEZVOUS_PORT = 29400
METRICS_PORT = 9400
RANKS_OF_A_NODE = 8  # at most: their metrics have a port each
GRACE_S = 120  # until a container is killed
SHUTDOWN_S = 90  # until torchrun kills its workers
SILENT_S = 600  # until a rank counts as hanging

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
    """What Kubeflow's models keep of a TrainJob: they drop what they don't know."""
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
    """Return the command; skip the test where there is none."""
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


def test_the_configuration_that_slurm_trains_by_default_is_there() -> None:
    [default] = re.findall(r"\$\{CONFIG:-(.*)\}", files.read("slurm.sh"))
    assert (ROOT / default).is_file()


@each_command
def test_the_entrypoint_finds_the_run_directory(command: Command) -> None:
    assert "run_dir" in command.trainer


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


# --- one table for all ---------------------------------------------------------------------------


def images() -> set[str]:
    compose = {service["image"] for service in files.trainers().values()}
    jobs = {pod["containers"][0]["image"] for pod in _pods_of_jobs()}
    kubeflow = files.of_kind("trainjob.yaml", "TrainJob")["spec"]["trainer"]["image"]
    return {*compose, *jobs, kubeflow}


def _pods_of_jobs() -> list[Document]:
    return [job["template"]["spec"] for job in files.jobs().values()]


def test_all_run_the_same_image_of_this_version() -> None:
    assert images() == IMAGES
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [version] = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert {re.split("[:-]", name)[2] for name in IMAGES} == {version}
    assert all(f"-t {name} ." in files.read("Dockerfile") for name in IMAGES)


@each_command
def test_all_meet_at_the_same_port(command: Command) -> None:
    endpoint = command.launcher.rdzv_endpoint
    assert not endpoint or endpoint.endswith(f":{RENDEZVOUS_PORT}")
    assert command.trainer.get("metrics_port", str(METRICS_PORT)) == str(METRICS_PORT)


def test_the_ports_of_kubernetes_are_the_trainers() -> None:
    for name, job in files.jobs().items():
        ports = {"rendezvous": RENDEZVOUS_PORT, "metrics": METRICS_PORT}
        [container] = job["template"]["spec"]["containers"]
        service = files.of_kind(name, "Service")["spec"]
        assert {each["name"]: each["containerPort"] for each in container["ports"]} == ports
        assert {each["name"]: each["port"] for each in service["ports"]} == ports
        [metrics] = files.of_kind(name, "NetworkPolicy")["spec"]["ingress"][1]["ports"]
        last = METRICS_PORT + RANKS_OF_A_NODE - 1
        assert (metrics["port"], metrics["endPort"]) == (METRICS_PORT, last)


def test_torchrun_waits_for_workers_and_is_waited_for_longer() -> None:
    several = [each.launcher for name, each in COMMANDS.items() if name != "Dockerfile"]
    assert {launcher.shutdown_timeout for launcher in several} == {SHUTDOWN_S}
    assert {pod["terminationGracePeriodSeconds"] for pod in files.pods().values()} == {GRACE_S}
    graces = {service["stop_grace_period"] for service in files.trainers().values()}
    assert graces == {f"{GRACE_S}s"}
    assert f"#SBATCH --signal=USR1@{GRACE_S}\n" in files.read("slurm.sh")
    assert SHUTDOWN_S < GRACE_S


def probes() -> dict[str, tuple[str, list[str]]]:
    """By file or service: the run directory of the trainer, and a probe's command."""
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
    """The first rule that fits holds."""
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [
        ("FailJob", [errors.EXIT_WRONG]),
        ("Ignore", None),  # disruptions
        ("Ignore", [errors.EXIT_STOPPED]),
        ("Count", [1, errors.EXIT_CANNOT_SAVE]),
    ]
    assert {
        rule["onExitCodes"]["containerName"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    } == {job["template"]["spec"]["containers"][0]["name"]}
    assert entrypoint.STOPPED == errors.EXIT_STOPPED


def test_who_starts_again_does_so_for_the_code_that_asks_for_it() -> None:
    [sky] = files.documents("skypilot.yaml")
    assert sky["resources"]["job_recovery"]["recover_on_exit_codes"] == [errors.EXIT_STOPPED]
    assert f"$code -eq {errors.EXIT_STOPPED} " in files.read("slurm.sh")
    readme = (DEPLOYMENT.parent / "README.md").read_text(encoding="utf-8")
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}
    assert told == {0, 1, errors.EXIT_CANNOT_SAVE, errors.EXIT_STOPPED, errors.EXIT_WRONG}


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


def test_each_rank_of_kubernetes_has_a_gpu() -> None:
    trainer = files.of_kind("trainjob.yaml", "TrainJob")["spec"]["trainer"]
    found = [(trainer["numProcPerNode"], trainer["resourcesPerNode"])]
    for name, pod in zip(files.jobs(), _pods_of_jobs(), strict=True):
        found.append((COMMANDS[name].launcher.nproc_per_node, pod["containers"][0]["resources"]))
    for ranks, resources in found:
        assert resources["limits"] == resources["requests"]
        assert resources["limits"]["nvidia.com/gpu"] == str(ranks) == str(RANKS_OF_A_NODE)


@pytest.mark.parametrize("name", files.jobs())
def test_all_that_selects_pods_selects_those_of_the_job(name: str) -> None:
    ours = {"batch.kubernetes.io/job-name": files.of_kind(name, "Job")["metadata"]["name"]}
    assert files.of_kind(name, "Service")["spec"]["selector"] == ours
    budget = files.of_kind(name, "PodDisruptionBudget")["spec"]
    assert budget["selector"]["matchLabels"] == ours
    assert budget["minAvailable"] == int(COMMANDS[name].launcher.nnodes.partition(":")[0])
    policy = files.of_kind(name, "NetworkPolicy")["spec"]
    peers = [policy["ingress"][0]["from"][0], policy["egress"][0]["to"][0]]
    selected = [policy["podSelector"], *(peer["podSelector"] for peer in peers)]
    assert [each["matchLabels"] for each in selected] == 3 * [ours]


def test_the_containers_of_compose_meet_at_node0() -> None:
    nodes = [name for name, service in files.trainers().items() if service["profiles"] == ["cpu"]]
    assert nodes == ["node0", "node1"]
    for name in nodes:
        launcher = COMMANDS[f"compose {name}"].launcher
        assert files.trainers()[name]["hostname"] == name
        assert launcher.rdzv_endpoint == f"node0:{RENDEZVOUS_PORT}"
        assert int(launcher.nnodes) == len(nodes)


# --- what is said --------------------------------------------------------------------------------


def test_links_of_the_readme_lead_somewhere() -> None:
    page = DEPLOYMENT.parent / "README.md"
    text = page.read_text(encoding="utf-8")
    assert test_docs.broken_links(text, page) == []
    linked = set(re.findall(r"\]\(deployment/([^)]+)\)", text))
    assert {path.name for path in DEPLOYMENT.glob("*.yaml")} | {"slurm.sh"} <= linked
