"""The manifests of docs/deploy: their options, metrics and probes exist, and custom resources follow their schemas.

Kubernetes' own schemas have 100 MB: `make scale-test` checks them (tests/scale/test_manifests.py).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from cyclopts import App

from jswa.cluster.rank import find_member
from jswa.env import NAMES as SWITCHES
from server import cli
from server.cluster.replicas import NAMES as OPTIONS
from server.cluster.replicas import Options, read_options
from server.gate.routes import ROUTES
from server.options import ServeConfig
from tests.support.server.harness import serving
from tests.support.server.processes import ROOT

DEPLOY = ROOT / "docs" / "deploy"
FILES = sorted(DEPLOY.glob("*.yaml"))
RAY = "ray-serve.yaml"  # a file for Ray, not a manifest of Kubernetes


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


def find(value: Any, key: str) -> Iterator[Any]:
    """Return all values under a key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        for one in value.values():
            yield from find(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from find(one, key)


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Return the pods that run `jswa`, with their files."""
    found = [(file.name, spec) for file in FILES for document in documents(file) for spec in find(document, "spec")]
    return [
        (name, spec) for name, spec in found if any(c.get("command") == ["jswa"] for c in spec.get("containers", ()))
    ]


def parsed(args: list[str]) -> tuple[str, ServeConfig, Any]:
    """Return the options that `jswa serve` reads from arguments."""
    app = App(name="jswa serve")
    app.default(cli.serve)
    assert args[0] == "serve"
    _, bound, _ = app.parse_args(args[1:], exit_on_error=False, print_error=False)
    return bound.args[0], bound.kwargs["server"], bound.kwargs.get("engine")


@pytest.mark.parametrize(("file", "spec"), pods(), ids=lambda value: str(value)[:24])
def test_pods_use_options_and_probes_that_exist(file: str, spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    model, server, engine = parsed(container["args"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(model.startswith(f"{mount}/") for mount in mounts)
    for variable in container["env"]:
        name = variable["name"]
        assert name in SWITCHES or name.removeprefix("JSWA_").lower() in OPTIONS
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
    free = {route.path for route in ROUTES if route.whose == "nobody"}
    assert all(probe["httpGet"]["path"] in free for probe in probes), "other paths need an API key"
    assert all(ports[probe["httpGet"]["port"]] == server.port for probe in probes)
    # A host without probes follows the first host, and takes as long as that one to drain.
    slept = sum(find(container, "seconds")) if probes else 10
    assert slept > 0
    assert spec["terminationGracePeriodSeconds"] >= slept + server.shutdown_timeout + 10
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == (1 if engine is None else engine.tensor_parallel_size // engine.nnodes)


def test_the_hosts_of_a_group_find_the_first_one() -> None:
    (group,) = [one for one in documents(DEPLOY / "leaderworkerset.yaml") if one["kind"] == "LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{kind}Template"]["spec"]["containers"][0] for kind in ("leader", "worker"))
    assert leader["args"] == worker["args"]
    assert leader["env"] == worker["env"]
    _, _, engine = parsed(leader["args"])
    told = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "leader.example"}
    places = [find_member(engine, {**told, "LWS_WORKER_INDEX": str(rank)}) for rank in range(template["size"])]
    assert [place.rank for place in places if place is not None] == list(range(template["size"]))
    (port,) = {place.port for place in places if place is not None}
    assert port in [one["containerPort"] for one in leader["ports"]]


def test_manifests_use_metrics_that_exist() -> None:
    with serving() as client:
        shown = set(re.findall(r"^(jswa:\w+)", client.get("/metrics").text, re.MULTILINE))
        client.complete()
        shown |= set(re.findall(r"^(jswa:\w+)", client.get("/metrics").text, re.MULTILINE))
    asked = {name for file in FILES for name in re.findall(r"jswa:[a-z]\w+", file.read_text())}
    assert asked <= shown
    assert len(asked) >= 6


def test_the_board_asks_for_metrics_and_labels_that_exist() -> None:
    with serving() as client:
        client.complete()
        text = client.get("/metrics").text
    shown: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(jswa:\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        shown.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    queries = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) >= 30
    for target in queries:
        names = re.findall(r"jswa:\w+", target["expr"])
        assert names
        assert set(names) <= shown.keys(), target["expr"]
        labels = set().union(*(shown[name] for name in names))
        asked = re.findall(r"by \(([\w, ]+)\)", target["expr"]) + re.findall(r"(\w+)=~?\"", target["expr"])
        asked += re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {label for one in asked for label in one.split(", ")} <= labels, target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def ray_configs() -> list[dict[str, Any]]:
    (service,) = documents(DEPLOY / "ray-service.yaml")
    return [documents(DEPLOY / RAY)[0], yaml.safe_load(service["spec"]["serveConfigV2"])]


def test_ray_gets_options_that_exist() -> None:
    alone, in_service = ray_configs()
    assert alone == in_service, "the two files describe different applications"
    (application,) = alone["applications"]
    options: Options = read_options(application["args"])
    assert options.server.served_model_name == ("model",)
    (service,) = documents(DEPLOY / "ray-service.yaml")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["maxReplicas"] >= options.replicas.most
    (spec,) = find(group, "spec")
    assert spec["terminationGracePeriodSeconds"] >= options.server.shutdown_timeout + 10
    limits = spec["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == options.replicas.num_gpus


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object", "properties": properties, "required": required or [], "additionalProperties": False,
    }  # fmt: skip


TEXT, WHOLE, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
POD = closed(["spec"], metadata=ANY, spec=ANY)  # checked by tests/scale
LABELS = {"type": "object", "additionalProperties": TEXT}
SECRET = closed(["name", "key"], name=TEXT, key=TEXT, optional={"type": "boolean"})
# The parts of the custom resource definitions that the manifests use.
CUSTOM = {
    # kubernetes-sigs/lws, config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml, August 2026
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): closed(
        ["leaderWorkerTemplate"],
        replicas=WHOLE,
        leaderWorkerTemplate=closed(
            ["workerTemplate"],
            size=WHOLE,
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=POD,
            workerTemplate=POD,
        ),
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    ),
    # prometheus-operator, example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml and …rules.yaml
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        ["podMetricsEndpoints", "selector"],
        selector=closed(
            matchLabels=LABELS,
            matchExpressions={
                "type": "array",
                "items": closed(
                    ["key", "operator"],
                    key=TEXT,
                    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                    values={"type": "array", "items": TEXT},
                ),
            },
        ),
        podMetricsEndpoints={
            "type": "array",
            "items": closed(
                port=TEXT,
                path=TEXT,
                interval={"type": "string", "pattern": r"^\d+(ms|s|m|h)$"},
                authorization=closed(type=TEXT, credentials=SECRET),
            ),
        },
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        groups={
            "type": "array",
            "items": closed(
                ["name"],
                name=TEXT,
                rules={
                    "type": "array",
                    "items": closed(
                        ["expr"],
                        alert=TEXT,
                        expr=TEXT,
                        **{"for": {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}},
                        labels=LABELS,
                        annotations=LABELS,
                    ),
                },
            ),
        }
    ),
    # ray-project/kuberay, helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml
    ("ray.io/v1", "RayService"): closed(
        serveConfigV2=TEXT,
        rayClusterConfig=closed(
            ["headGroupSpec"],
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=closed(["template"], rayStartParams=LABELS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    ["groupName", "template"],
                    groupName=TEXT,
                    replicas=WHOLE,
                    minReplicas=WHOLE,
                    maxReplicas=WHOLE,
                    rayStartParams=LABELS,
                    template=POD,
                ),
            },
        ),
    ),
}


@pytest.mark.parametrize("file", [file for file in FILES if file.name != RAY], ids=lambda file: file.stem)
def test_custom_resources_follow_their_schemas(file: Path) -> None:
    for document in documents(file):
        schema = CUSTOM.get((document["apiVersion"], document["kind"]))
        if schema is not None:
            whole = closed(
                ["metadata", "spec"], apiVersion=TEXT, kind=TEXT, metadata=closed(["name"], name=TEXT), spec=schema
            )
            jsonschema_rs.validate(whole, document)


def test_the_check_of_custom_resources_can_fail() -> None:
    (group, _) = documents(DEPLOY / "leaderworkerset.yaml")
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(CUSTOM["leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"], group["spec"])
