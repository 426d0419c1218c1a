"""No container has more rights than Kubernetes' strictest standard allows."""

import re

import deployment_files as files
import pytest
import yaml
from deployment_files import Document

USER = 10001
PODS = {**files.pods(), "kubernetes-data.yaml": files.data_job()["template"]["spec"]}

each_pod = pytest.mark.parametrize("pod", files.pods().values(), ids=files.pods())

# --- Pod Security Standards, "restricted" --------------------------------------------------------

ALLOWED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def violations(pod: Document) -> list[str]:
    """Return the reasons why the standard's "restricted" level rejects a Pod."""
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    for volume in pod.get("volumes", []):
        found += [f"a volume of {kind}" for kind in volume.keys() - ALLOWED_VOLUMES - {"name"}]
    of_pod = pod.get("securityContext", {})
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = {**of_pod, **container.get("securityContext", {})}
        found += [problem for problem, is_so in _problems(context, container) if is_so]
    return found


def _problems(context: Document, container: Document) -> list[tuple[str, bool]]:
    capabilities = context.get("capabilities", {})
    profile = context.get("seccompProfile", {}).get("type")
    return [
        ("may be root", context.get("runAsNonRoot") is not True),
        ("is root", context.get("runAsUser") == 0),
        ("may gain privileges", context.get("allowPrivilegeEscalation") is not False),
        ("is privileged", bool(context.get("privileged"))),
        ("keeps capabilities", capabilities.get("drop") != ["ALL"]),
        ("adds capabilities", bool({*capabilities.get("add", [])} - {"NET_BIND_SERVICE"})),
        ("no seccomp profile", profile not in ("RuntimeDefault", "Localhost")),
        ("a port of the host", any("hostPort" in port for port in container.get("ports", []))),
    ]


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_are_restricted(pod: Document) -> None:
    assert violations(pod) == []
    labels = files.of_kind("kubernetes.yaml", "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_rdma_adds_one_capability_and_needs_a_privileged_namespace() -> None:
    overlay = files.with_rdma()
    [namespace] = [each for each in overlay if each["kind"] == "Namespace"]
    [job] = [each for each in overlay if each["kind"] == "Job"]
    assert violations(job["spec"]["template"]["spec"]) == ["adds capabilities"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == "privileged"  # "baseline" refuses IPC_LOCK, too


@each_pod
def test_pods_write_only_where_they_must(pod: Document) -> None:
    [container] = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    written = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert {mount["mountPath"] for mount in written} == {"/runs", "/dev/shm", "/tmp"}


# --- compose -----------------------------------------------------------------------------------


def test_compose_publishes_ports_for_this_machine_only() -> None:
    published = [port for each in files.services().values() for port in each.get("ports", [])]
    assert published == ["127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]


@pytest.mark.parametrize("name", files.trainers())
def test_containers_of_compose_have_no_more_rights_than_pods(name: str) -> None:
    service = files.trainers()[name]
    assert service["user"] == f"{USER}:{USER}"
    assert (service["read_only"], service["init"]) == (True, True)
    assert (service["cap_drop"], service.get("cap_add")) == (["ALL"], None)
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert service["shm_size"] != "64mb"


# --- the image -----------------------------------------------------------------------------------


def test_images_are_pinned_and_ours_runs_as_a_user_by_number() -> None:
    [base] = [rest for _, rest in files.instructions() if rest.startswith("BASE=")]
    for image in (base, *(service["image"] for service in files.services().values())):
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
    assert [rest for name, rest in files.instructions() if name == "USER"] == [f"{USER}:{USER}"]
    assert {pod["securityContext"]["runAsUser"] for pod in files.pods().values()} == {USER}


def test_signals_reach_the_entrypoint_and_no_shell() -> None:
    found = dict(files.instructions())
    assert yaml.safe_load(found["ENTRYPOINT"]) == ["python", f"{files.IN_IMAGE}/entrypoint.py"]
    kubeflow = files.of_kind("trainjob.yaml", "TrainJob")["spec"]["trainer"]["command"]
    assert kubeflow == yaml.safe_load(found["ENTRYPOINT"])
