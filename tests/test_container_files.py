"""conf/compose.yaml and conf/kubernetes.yaml: what they name is there, and a server with their settings serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from geventstalk.cli.program import leaves
from tests.clients.programs import missing
from tests.support.process import ROOT, ServerProcess, free_port
from tests.support.web import Web
from tests.test_cluster_files import is_setting

CONF = ROOT / "conf"
COMPOSE = (CONF / "compose.yaml").read_text()
Starter = Callable[..., ServerProcess]


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load(COMPOSE)


@pytest.fixture
def kubernetes() -> dict[str, Any]:
    documents = yaml.safe_load_all((CONF / "kubernetes.yaml").read_text())
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in documents}


def settings_of(environment: dict[str, str], folder: Path, port: int) -> dict[str, str]:
    """Returns what a container is given, for a server on this host."""
    ours = {key: value for key, value in environment.items() if key.startswith("GEVENTSTALK_")}
    assert ours and all(map(is_setting, ours)), ours
    ours["GEVENTSTALK_HTTP"] = ours["GEVENTSTALK_HTTP"].replace("0.0.0.0:8080", f"127.0.0.1:{port}")
    ours["GEVENTSTALK_HTTP_TOKENS"] = str(folder / Path(ours["GEVENTSTALK_HTTP_TOKENS"]).name)
    return ours


def test_the_compose_file_names_what_there_is(compose: Any) -> None:
    for service in compose["services"].values():
        assert {each["source"] for each in service.get("configs", ())} <= set(compose["configs"])
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert {each.partition(":")[0] for each in service["volumes"]} <= set(compose["volumes"])
        assert all(each.startswith("127.0.0.1:") for each in service["ports"])
        assert "latest" not in service["image"]
    for each in compose["configs"].values():
        assert "content" in each or (CONF / each["file"]).is_file()
    boards = yaml.safe_load(compose["configs"]["boards"]["content"])["providers"][0]["options"]["path"]
    targets = [each["target"] for each in compose["services"]["grafana"]["configs"]]
    assert f"{boards}/geventstalk.json" in targets
    data = yaml.safe_load(compose["configs"]["datasource"]["content"])["datasources"][0]
    assert (data["type"], data["url"]) == ("prometheus", "http://prometheus:9090")
    board = json.loads((CONF / "grafana" / "geventstalk.json").read_text())
    assert board["templating"]["list"][0]["query"] == "prometheus"


def test_prometheus_takes_its_settings(compose: Any, tmp_path: Path) -> None:
    promtool = shutil.which("promtool") or missing("promtool is not installed")
    content = compose["configs"]["prometheus"]["content"]
    assert "/run/secrets/metrics-token" in content
    (tmp_path / "token").touch()
    (tmp_path / "prometheus.yml").write_text(content.replace("/run/secrets/metrics-token", f"{tmp_path}/token"))
    shutil.copy(CONF / "alerts.yaml", tmp_path)
    done = subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_the_compose_file_make_tokens_that_work(
    compose: Any, tmp_path: Path, start_server: Starter
) -> None:
    shutil.which("openssl") or missing("openssl is not installed")
    lines = re.findall(r"^#   (umask.*|printf.*)$", COMPOSE, re.M)
    script = re.sub(r"sudo chown \S+ \S+(; )?", "", "\n".join(lines)).replace("; \n", "\n")
    subprocess.run(["sh", "-euc", script], cwd=tmp_path, check=True)
    port = free_port()
    environment = compose["services"]["geventstalk"]["environment"]
    start_server(env=settings_of(environment, tmp_path, port))
    person = Web(port, (tmp_path / "tokens").read_text().split()[2])
    assert person.status("POST", "/api/v1/jobs", {"tube": "t", "body": "x"}) == 201
    scraper = Web(port, (tmp_path / "metrics-token").read_text())
    job = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"][0]
    bearer = {"Authorization": f"Bearer {scraper.token}"}
    for host, status in ((job["static_configs"][0]["targets"][0], 200), ("other:8080", 421)):
        assert scraper.send("GET", "/metrics", None, {"Host": host, **bearer})[0] == status
    assert scraper.status("DELETE", "/api/v1/jobs/1") == 403


def test_the_parts_of_kubernetes_fit_together(
    kubernetes: dict[str, Any], tmp_path: Path, start_server: Starter
) -> None:
    nodes = kubernetes["StatefulSet/geventstalk"]["spec"]
    pod = nodes["template"]["spec"]
    (server,) = pod["containers"]
    labels = nodes["template"]["metadata"]["labels"]
    assert nodes["selector"]["matchLabels"] == labels
    assert kubernetes["PodDisruptionBudget/geventstalk"]["spec"]["selector"]["matchLabels"] == labels
    assert kubernetes["PodDisruptionBudget/geventstalk"]["spec"]["minAvailable"] < nodes["replicas"]
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    for name in ("geventstalk", nodes["serviceName"]):
        service = kubernetes[f"Service/{name}"]["spec"]
        assert service["selector"] == labels
        assert all(ports[each["name"]] == each["port"] for each in service["ports"])
    flags = [word.removeprefix("--") for word in server["args"] if word.startswith("--")]
    assert flags and all(map(is_setting, flags))
    assert f"$(NODE).{nodes['serviceName']}:{ports['beanstalk']}" in server["args"]
    (init,) = kubernetes["Job/geventstalk-init"]["spec"]["template"]["spec"]["containers"]
    assert " ".join(init["args"]) in [words for words, _ in leaves(["cluster"])]
    of_init = {each["name"]: each for each in init["env"]}
    of_node = {each["name"]: each for each in server["env"]}
    assert of_init.items() <= of_node.items()
    host = re.search(r"@([\w-]+)/", of_init["GEVENTSTALK_JOURNAL"]["value"])
    database = kubernetes["Cluster/geventstalk-db"]["metadata"]["name"]
    assert host and host[1] == f"{database}-rw"
    assert of_init["PGPASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == f"{database}-app"
    mount, volume = server["volumeMounts"][0], pod["volumes"][0]
    assert of_node["GEVENTSTALK_HTTP_TOKENS"]["value"] == f"{mount['mountPath']}/tokens"
    assert mount["name"] == volume["name"]
    # The token file as Kubernetes mounts it: a link, and readable by the group of the pod.
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "tokens").write_text("me admin 0123456789abcdef\n")
    (tmp_path / "..data" / "tokens").chmod(volume["secret"]["defaultMode"])
    (tmp_path / "tokens").symlink_to("..data/tokens")
    environment = {name: each["value"] for name, each in of_node.items() if "value" in each}
    del environment["GEVENTSTALK_JOURNAL"]
    port = free_port()
    start_server(env=settings_of(environment, tmp_path, port))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = server[probe]["httpGet"]
        assert asked["port"] in ports and Web(port).status("GET", asked["path"]) == 200
