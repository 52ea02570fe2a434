"""Sends requests that are generated from the server's own OpenAPI description (schemathesis): none may be the server's
error.

schemathesis is in an environment of its own, because it brings its own versions of libraries that vLLM uses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server

pytestmark = [pytest.mark.server, pytest.mark.models, pytest.mark.exhaustive, pytest.mark.download]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-schemathesis"
SCHEMATHESIS = "schemathesis>=4.32,<5"
MODEL = "tiny"
SECONDS = {"coverage": 300, "fuzzing": 200}
"""Time of each phase: `coverage` tries the limits of every value, `fuzzing` sends random requests."""
LIMITS = ("--max-model-len", "64", "--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--dtype", "float32")
KNOWN: dict[tuple[str, str], str] = {
    ("/v1/systemone", "does not support the structured decision API"): (
        "vllm/entrypoints/generate/structured_decisions/api_router.py:50 (0.33.0) answers 501 for such models"
    ),
    ("/v1/decisions", "does not support the Decisions API"): (
        "vllm/entrypoints/openai/decisions/api_router.py:45 (0.33.0) answers 501 for such models"
    ),
}
"""Errors of vLLM itself: path and part of the message, with the line of vLLM's source."""


@pytest.fixture(scope="module")
def program() -> Path:
    """Returns the command, after its environment was made."""
    command = ENVIRONMENT / "bin" / "schemathesis"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, timeout=300)
        install = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "-q", SCHEMATHESIS]
        subprocess.run(install, check=True, timeout=600)
    return command


@pytest.fixture(scope="module", params=["generation with adapters", "embedding"])
def server(
    request: pytest.FixtureRequest, tiny_llama: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Starts a server of each kind, because their routes differ. Adapters are loaded over HTTP."""
    given, variables = (str(minilm),), {}
    if request.param != "embedding":
        given = (str(tiny_llama), "--num-gpu-blocks-override", "80", "--enable-lora", "--max-lora-rank", "8")
        variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    folder = tmp_path_factory.mktemp("schema")
    # Routes for developers call functions in workers, which a user cannot.
    developers: dict[str, str | None] = {"VLLM_SERVER_DEV_MODE": None}
    with Server(folder, *given, "--served-model-name", MODEL, *LIMITS, variables=developers | variables) as running:
        yield running


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("phase", SECONDS)
def test_no_request_is_the_servers_error(phase: str, program: Path, server: Server, tmp_path: Path) -> None:
    command = [
        str(program),
        "run",
        f"{server.address}/openapi.json",
        "--checks",
        "not_a_server_error",
        "--phases",
        phase,
    ]
    command += ["--max-time", str(SECONDS[phase]), "--seed", "1", "--continue-on-failure", "--no-shrink", "--no-color"]
    command += ["--request-timeout", "60", "--suppress-health-check", "all", "--generation-database", "none"]
    # It changes the number of ranks, and waits for that.
    command += ["--exclude-path", "/scale_elastic_ep"]
    command += ["--report", "har", "--report-har-path", str(tmp_path / "requests.har")]
    variables = {"SCHEMATHESIS_HOOKS": "http_schema_hooks", "SERVED_MODEL": MODEL, "NO_PROXY": "*"}
    variables["PYTHONPATH"] = str(Path(__file__).parent)
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS[phase] + 300)
    entries = json.loads((tmp_path / "requests.har").read_text())["log"]["entries"]
    assert len(entries) > 200, run.stdout[-4000:] + run.stderr[-4000:]
    failed = [entry for entry in entries if entry["response"]["status"] >= 500 and not is_known(entry)]
    assert not failed, json.dumps(failed[:3], indent=1)
    assert server.healthy()


def is_known(entry: dict[str, Any]) -> bool:
    """Returns whether an answer is an error of vLLM that is listed."""
    path = "/" + entry["request"]["url"].split("/", 3)[-1].partition("?")[0]
    text = entry["response"]["content"].get("text", "")
    return any(path == known and message in text for known, message in KNOWN)
