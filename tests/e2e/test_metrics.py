"""Tests Backplane's metrics on /metrics of real servers, and that the dashboard and the page have each of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import SIM
from server import LIMITS, VLLM, Server

from vllm_backplane.metrics import folder
from vllm_backplane.metrics.series import METRICS, PARTS

pytestmark = [pytest.mark.server, pytest.mark.models]

SERVE = Path(__file__).resolve().parents[2] / "docs" / "serve"
PROMPT = [(17 * place + place * place) % 500 + 5 for place in range(100)]
"""More tokens than a step may have, so the prefill takes two steps."""
TOKENS = 24
EVERY = "8"
"""The operators of one step in eight are measured."""
ON_DEVICE = {"cpu": {"BACKPLANE_DEVICE": "cpu"}, "sim": SIM}


@pytest.fixture(scope="module", params=["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def started(device: str, model: Path, at: Path, *more: str, **variables: str) -> Server:
    extra = {"capacity": "64MiB"}
    offload = {"kv_connector": "BackplaneOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    given = (str(model), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS)
    if not more:
        given = (*given, "--kv-transfer-config", json.dumps(offload))
    return Server(at, *given, *more, variables={**ON_DEVICE[device], **variables})


@pytest.fixture(scope="module")
def server(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(device, tiny_llama, tmp_path_factory.mktemp(device), BACKPLANE_OPERATOR_SAMPLING=EVERY) as running:
        yield running


@pytest.fixture(scope="module")
def silent(device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts a server with --disable-log-stats."""
    with started(device, tiny_llama, tmp_path_factory.mktemp("silent"), "--disable-log-stats") as running:
        yield running


def steps(server: Server) -> dict[str, float]:
    """Returns the number of steps by reason, or by the mode `replayed`."""
    found = {}
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith("backplane:steps_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[labels["reason"] or labels["mode"]] = float(line.rpartition(" ")[2])
    return found


def seconds(server: Server) -> dict[str, float]:
    return {part: server.metric("backplane:step_seconds_total", part=part) for part in PARTS}


@pytest.mark.feature("Serving: metrics of steps, graphs, operators and memory", "{device}")
def test_values_move_with_the_steps_of_a_request(server: Server) -> None:
    server.complete(PROMPT[:40], 4)  # captures the decode step, where that happens while serving
    before, before_seconds, began = steps(server), seconds(server), time.perf_counter()
    server.complete(PROMPT, TOKENS)
    elapsed = time.perf_counter() - began
    after, after_seconds = steps(server), seconds(server)
    moved = {reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]}
    # The first token comes with the prefill. With async scheduling the engine begins one more step.
    assert moved.pop("prefill") == 2
    sampled = moved.pop("sampled")
    assert set(moved) == {"replayed"}
    assert moved["replayed"] + sampled in (TOKENS - 1, TOKENS)
    assert 2 <= sampled <= 4
    spent = {part: after_seconds[part] - before_seconds[part] for part in PARTS}
    assert min(spent.values()) > 0
    assert sum(spent.values()) <= elapsed


def test_operators_of_sampled_steps(server: Server) -> None:
    server.complete(PROMPT, TOKENS)
    assert server.metric("backplane:operator_sampled_steps_total", rank="0") >= 3
    for operator in ("paged_attention", "logits", "greedy_argmax", "fused_add_rms_norm"):
        assert server.metric("backplane:operator_seconds_total", rank="0", operator=operator) > 0, operator
    assert 'operator="selective_scan"' not in server.http.get("/metrics").text, "the model has no such layer"
    inside = server.metric("backplane:operator_seconds_total")
    assert inside <= sum(seconds(server).values())


def test_memory_and_graphs(server: Server) -> None:
    total, used, peak = (
        server.metric("backplane:device_memory_bytes", kind=kind) for kind in ("total", "used", "peak")
    )
    assert 0 < used <= total
    assert 0 < peak <= total
    assert server.metric("backplane:graphs_captured", rank="0") >= 1
    assert server.metric("backplane:card_errors_total") == 0


def test_counters_are_counters(server: Server) -> None:
    text = server.http.get("/metrics").text
    for name, metric in METRICS.items():
        assert f"# TYPE {name} {metric.kind}" in text


def test_the_tokens_are_those_without_metrics_which_show_nothing(server: Server, silent: Server) -> None:
    """Tests that sampled steps compute the same, and that --disable-log-stats leaves nothing."""
    for length in (3, 40, 100):
        alone = silent.complete(PROMPT[:length], TOKENS)["token_ids"]
        assert server.complete(PROMPT[:length], TOKENS)["token_ids"] == alone
    text = silent.http.get("/metrics").text
    assert "backplane:" not in text and "vllm:" not in text
    assert "custom stat loggers were found" not in silent.text()
    processes = [silent.pid, *(process.pid for process in silent.descendants())]
    assert [path for pid in processes for path in folder.root().glob(f"{pid}-*")] == []
    assert list(folder.files(f"{server.pid}-*")) != []


def test_the_page_and_the_dashboard_have_every_metric(server: Server) -> None:
    """Tests each expression of the dashboard against the text of a server that has answered requests."""
    text = server.http.get("/metrics").text
    served = set(re.findall(r"^([a-z0-9_:]+)(?:\{| )", text, re.MULTILINE))
    own = {name for name in served if name.startswith("backplane:") and not name.endswith("_created")}
    assert set(METRICS) <= own
    dashboard = json.loads((SERVE / "grafana-dashboard.json").read_text())
    used = set(
        re.findall(r"\b((?:vllm|backplane):[a-z0-9_]+)", json.dumps([p.get("targets") for p in panels(dashboard)]))
    )
    assert len(used) > len(own)
    assert used <= served, f"the server does not have {sorted(used - served)}"
    assert own <= used, f"the dashboard lacks {sorted(own - used)}"
    page = (SERVE / "metrics.md").read_text()
    assert {name for name in own if f"`{name}`" not in page} == set()


def panels(dashboard: dict[str, list[dict[str, object]]]) -> list[dict[str, object]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.mark.exhaustive
def test_several_api_servers_count_each_step_once(
    device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with started(device, tiny_llama, tmp_path_factory.mktemp("several"), "--api-server-count", "2") as server:
        for _ in range(4):  # the system chooses the API server of a connection
            server.complete(PROMPT, TOKENS)
        time.sleep(3)
        found = []
        for _ in range(8):
            server.http.close()
            server.http = type(server.http)(base_url=server.address, timeout=300, trust_env=False)
            found.append(steps(server))
        assert found == found[:1] * 8
        assert found[0]["prefill"] == 2 + 3, "all but the first find most of the prompt in the prefix cache"


@pytest.mark.exhaustive
def test_a_server_of_vllm_shows_them_too(
    device: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = (str(tiny_llama), "--served-model-name", "tiny", "--skip-tokenizer-init", *LIMITS)
    with Server(
        tmp_path_factory.mktemp("vllm"), *given, command=VLLM, variables=ON_DEVICE[device], warm=False
    ) as server:
        server.complete(PROMPT, TOKENS)
        assert steps(server)["prefill"] == 2
