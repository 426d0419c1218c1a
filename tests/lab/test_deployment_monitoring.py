"""Prometheus and Grafana: the dashboard shows what the trainer exports, and Prometheus reads it."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from deployment_files import DEPLOYMENT, services
from processes import free_port
from test_deployment import METRICS_PORT, RANKS_OF_A_NODE

from distlab.production.reports import METRICS
from solutions.phase4_production.exporters import PrometheusExporter

GRAFANA = DEPLOYMENT / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards/dashboard.json").read_text(encoding="utf-8"))
CONFIG = yaml.safe_load((DEPLOYMENT / "prometheus.yml").read_text(encoding="utf-8"))
STEP = "step"  # a metric on each page, besides the trainer's own
TIMEOUT_S = 60

PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
QUERIES = {
    f"{title} {target['refId']}": target["expr"]
    for title, panel in PANELS.items()
    for target in panel["targets"]
}

# --- the dashboard -------------------------------------------------------------------------------


def metrics(query: str) -> set[str]:
    """Return the names of the metrics in a query."""
    found: set[str] = set()

    def note(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name or "")

    promql_parser.walk(promql_parser.parse(query), note)
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_panels_show_what_the_trainer_exports(query: str) -> None:
    assert metrics(query) <= {*METRICS, STEP}


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    [source] = provisioned("datasources/prometheus.yaml")["datasources"]
    used = {target["datasource"]["uid"] for p in PANELS.values() for target in p["targets"]}
    assert {source["uid"]} == used | {panel["datasource"]["uid"] for panel in PANELS.values()}
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == CONFIG["global"]["scrape_interval"]
    [provider] = provisioned("dashboards/dashboards.yaml")["providers"]
    mounted = services()["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounted


def provisioned(name: str) -> Any:
    return yaml.safe_load((GRAFANA / "provisioning" / name).read_text(encoding="utf-8"))


# --- Prometheus ----------------------------------------------------------------------------------


def test_prometheus_asks_every_rank_of_every_container() -> None:
    [job] = [job for job in CONFIG["scrape_configs"] if job["job_name"] == "trainer"]
    asked = {(name, each["port"]) for each in job["dns_sd_configs"] for name in each["names"]}
    aliases = {
        alias: service["profiles"]
        for service in services().values()
        for alias in service.get("networks", {}).get("default", {}).get("aliases", [])
    }
    gpu = {("trainer-gpu", METRICS_PORT + rank) for rank in range(RANKS_OF_A_NODE)}
    assert asked == {("trainer-cpu", METRICS_PORT)} | gpu
    assert aliases == {"trainer-cpu": ["cpu"], "trainer-gpu": ["gpu"], "dcgm": ["gpu"]}


def test_promtool_accepts_the_configuration() -> None:
    if not shutil.which("promtool"):
        pytest.skip("Prometheus is not installed: on Debian and Ubuntu, apt install prometheus")
    command = ["promtool", "check", "config", str(DEPLOYMENT / "prometheus.yml")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def samples_of(rank: int) -> dict[str, float]:
    """Return a value for each metric; only ``data_s`` differs between ranks."""
    return {**dict.fromkeys(METRICS, 1.0), "data_s": 0.5 * (1 + rank), "loss": float("nan")}


@pytest.fixture(scope="module")
def pages() -> Iterator[list[int]]:
    """The ports of the real metrics pages of two ranks."""
    exporters = [PrometheusExporter({"run": "test", "rank": str(rank)}) for rank in range(2)]
    for rank, exporter in enumerate(exporters):
        exporter.write(samples_of(rank), step=7)
    yield [exporter.port for exporter in exporters]
    for exporter in exporters:
        exporter.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, pages: list[int]) -> Iterator[str]:
    """The address of a Prometheus that reads the pages as prometheus.yml says, but more often."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed: on Debian and Ubuntu, apt install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [{"targets": [f"127.0.0.1:{port}" for port in pages]}]
    jobs = [{"job_name": "trainer", "scrape_interval": "1s", "static_configs": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump({**CONFIG, "scrape_configs": jobs}))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder}"]
    command = ["prometheus", *options, f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command)
    try:
        wait_for_samples(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_for_samples(address: str, process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        assert process.poll() is None, "Prometheus has ended"
        try:
            if len(ask(address, "step")) == 2:
                return
        except (urllib.error.URLError, ConnectionError):
            pass  # it is not listening yet
        time.sleep(0.1)
    pytest.fail("Prometheus has read no page")


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Return the series that answer a query."""
    text = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{text}", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


def test_prometheus_reads_every_metric_of_every_rank(prometheus: str) -> None:
    for name in (*METRICS, STEP):
        found = ask(prometheus, name)
        ranks = {(series["metric"]["run"], series["metric"]["rank"]) for series in found}
        assert ranks == {("test", "0"), ("test", "1")}, name


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_each_panel_shows_something(prometheus: str, query: str) -> None:
    assert ask(prometheus, query.replace("$run", ".*")) != []


def test_the_slow_rank_stands_out(prometheus: str) -> None:
    """The slow rank takes 1 + 1 s and the other 1 + 0.5 s, so the median is 1.75 s."""
    [query] = [q for name, q in QUERIES.items() if name.startswith("Stragglers")]
    found = ask(prometheus, query.replace("$run", ".*"))
    ratios = {each["metric"]["rank"]: float(each["value"][1]) for each in found}
    assert ratios == pytest.approx({"0": 1.5 / 1.75, "1": 2 / 1.75})
