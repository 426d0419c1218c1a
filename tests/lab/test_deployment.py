"""The deployment manifests are valid, and agree with the trainer."""

import copy
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import deployment_files as files
import kubernetes_validate
import pytest
import yaml
from deployment_files import DEPLOYMENT, ROOT, Command, Document
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from distlab.production import errors
from distlab.production.config import Config, make_config
from solutions.phase4_production.deployment import entrypoint, fill

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
    for name in ("kubernetes.yaml", "kubernetes-elastic.yaml", "kubernetes-data.yaml")
    for document in files.documents(name)
] + [
    pytest.param(document, id=f"with RDMA {document['kind']} {document['metadata']['name']}")
    for document in files.with_rdma()
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
        ("Count", [1, errors.EXIT_IN_USE, errors.EXIT_CANNOT_SAVE]),
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
    own = service["metadata"]["name"]
    launcher, spec = COMMANDS[name].launcher, job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["subdomain"] == own
    assert launcher.rdzv_endpoint == f"{full_name(job, own)}:{RENDEZVOUS_PORT}"
    assert launcher.rdzv_backend == "c10d"
    assert spec["completions"] == spec["parallelism"] == int(launcher.nnodes.rpartition(":")[2])
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == (
        *("None", True),
    )


def full_name(job: Document, service: str) -> str:
    """Return the name of a Job's first Pod that the kubelet writes into its /etc/hosts."""
    own = job["metadata"]
    return f"{own['name']}-0.{service}.{own['namespace']}.svc.cluster.local"


@pytest.mark.parametrize("name", files.jobs())
def test_the_first_pod_hosts_the_rendezvous_before_the_dns_knows_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pod's DNS record comes some seconds after the Pod; until then only /etc/hosts knows it."""
    job, service = files.of_kind(name, "Job"), files.of_kind(name, "Service")
    full = full_name(job, service["metadata"]["name"])
    short = full.partition(".")[0]

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in (full, short):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, full, ("10.1.2.3", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: short)
    assert _matches_machine_hostname(COMMANDS[name].launcher.rdzv_endpoint.partition(":")[0])


@pytest.mark.parametrize("name", files.jobs())
def test_names_can_be_asked_for_wherever_the_cluster_answers(name: str) -> None:
    """NodeLocal DNSCache answers at an address of the node, which no selector of Pods finds."""
    rules = files.of_kind(name, "NetworkPolicy")["spec"]["egress"]
    ports = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    assert {"ports": ports} in rules


# --- nodes and volumes ---------------------------------------------------------------------------

LARGEST_SAVE = 16e9  # bytes of 1 B parameters: weights, two moments of AdamW, a mean
WRITE, VERIFY = 100e6, 500e6  # bytes/s of a slow file server, and of reading and hashing
TORCHRUN_S = 60  # for torchrun's own end, with a margin
each_pod = pytest.mark.parametrize("name", files.pods())


@each_pod
def test_the_largest_save_fits_into_the_grace_period(name: str) -> None:
    """SIGTERM may come during a save: the last one waits for it, and each verifies older ones."""
    shutdown_s = COMMANDS[name].launcher.shutdown_timeout
    older = Config.model_fields["keep"].default - 1
    assert shutdown_s >= 2 * LARGEST_SAVE * (1 / WRITE + older / VERIFY)
    assert files.pods()[name]["terminationGracePeriodSeconds"] >= shutdown_s + TORCHRUN_S


@each_pod
def test_nodes_that_are_kept_for_gpus_take_the_pods(name: str) -> None:
    tolerated = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert files.pods()[name]["tolerations"] == [tolerated]


def test_a_job_can_fill_the_volume_that_the_trainer_reads() -> None:
    claims = {
        each["metadata"]["name"]: each["spec"]["accessModes"]
        for each in files.documents("kubernetes.yaml")
        if each["kind"] == "PersistentVolumeClaim"
    }
    pod = files.data_job()["template"]["spec"]
    [volume], [container] = pod["volumes"], pod["containers"]
    [mount] = container["volumeMounts"]
    assert claims[volume["persistentVolumeClaim"]["claimName"]] == ["ReadWriteMany"]
    assert not volume["persistentVolumeClaim"].get("readOnly")
    assert (mount["name"], mount.get("readOnly")) == (volume["name"], None)
    assert container["args"][1] == mount["mountPath"]
    assert container["command"] == ["python", f"{files.IN_IMAGE}/fill.py"]


def archive_of(folder: Path, *names: str) -> str:
    """Write a tar archive with these files, and return its address."""
    for name in names:
        (folder / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "from" / name).write_text(name)
    with tarfile.open(folder / "images.tar", "w") as archive:
        archive.add(folder / "from", arcname=".")
    return (folder / "images.tar").as_uri()


def test_filling_unpacks_the_images_once(tmp_path: Path) -> None:
    url, folder = archive_of(tmp_path, "train/cat/1.JPEG", "val/cat/2.JPEG"), tmp_path / "data"
    assert fill.main([url, str(folder)]) == 0
    assert (folder / "val/cat/2.JPEG").read_text() == "val/cat/2.JPEG"
    (tmp_path / "images.tar").unlink()
    assert fill.main([url, str(folder)]) == 0


def test_filling_with_half_of_the_data_is_an_error_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = archive_of(tmp_path, "train/cat/1.JPEG")
    for _ in range(2):
        assert fill.main([url, str(tmp_path / "data")]) == 1
        assert capsys.readouterr().err == f"{url} has no val: pack train/ and val/\n"
