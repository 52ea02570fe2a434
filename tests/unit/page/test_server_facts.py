"""Tests what the page shows of a server, and that it shows no secrets and no folders of the machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from vllm_backplane.page import server_facts as module
from vllm_backplane.page.server_facts import WITHHELD, server_facts, shown_value, without_folders
from vllm_backplane.settings.options import Option, Setting, text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("threads", 4, "4"),
        ("bind", True, "on"),
        ("reference_ops", ("a", "b"), "a, b"),
        ("api_key", "sk-1", WITHHELD),
        ("hub_token", "hf_1", WITHHELD),
        ("password", "p", WITHHELD),
        ("store", "/home/somebody/cache/blocks", "…/blocks"),
        ("nested", {"key": "sk-1", "path": "/a/b/c", "size": 3}, f"key: {WITHHELD}, path: …/c, size: 3"),
        ("name", "a\x1b[31m\u202eb", "a␛[31m\\u202eb"),
    ],
)
def test_values_are_shown_without_secrets_and_folders(name: str, value: Any, shown: str) -> None:
    assert shown_value(name, value) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("requested by BACKPLANE_DEVICE=cpu", "requested by BACKPLANE_DEVICE=cpu"),
        ("/opt/vendor/lib/libnpu.so", "…/libnpu.so"),
        ("loaded from /opt/x/y.so, and 'a/b'", "loaded from …/y.so, and 'a/b'"),
        ("org/model:Q4 and 1/2", "org/model:Q4 and 1/2"),
    ],
)
def test_paths_are_reduced_to_their_last_part(given: str, shown: str) -> None:
    assert without_folders(given) == shown


class Engine:
    """Stands in for the client of an engine with one rank."""

    def __init__(self) -> None:
        cache = SimpleNamespace(
            kv_cache_size_tokens=1000, num_gpu_blocks=10, block_size=16, cache_dtype="auto", enable_prefix_caching=True
        )
        model = SimpleNamespace(
            served_model_name="<b>", quantization=None, model="/srv/models/secret-place", dtype="torch.float32",
            max_model_len=256, enable_sleep_mode=False,
        )  # fmt: skip
        self.model_config = model
        self.vllm_config = SimpleNamespace(
            additional_config={},
            cache_config=cache,
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=False),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE")),
            lora_config=None,
            speculative_config=None,
        )

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "backplane_facts"
        line = {"operator": "o", "provider": "/opt/vendor/lib.so", "reason": "r"}
        return [{"rank": 0, "card": "c", "operators": [line], "patches": ["p applied"], "switched_off": {}}]

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(chat_template="t")


ARGUMENTS = SimpleNamespace(
    served_model_name=["<b>", "second"], model="/srv/models/secret-place", chat_template=None, disable_log_stats=True,
    api_key=["sk-of-the-server"], ssl_keyfile="/etc/secret-place/key.pem", hf_token="hf_secret",
)  # fmt: skip


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the device and its options."""
    option = Option("hub_token", None, text, "")
    settings = {"": {"hub_token": Setting("npu", option, "hf_secret", "BACKPLANE_NPU_HUB_TOKEN")}}
    selection = SimpleNamespace(reason="requested", probe=SimpleNamespace(count=1))
    runtime = SimpleNamespace(device=SimpleNamespace(name="npu"), selection=selection, settings=settings)
    monkeypatch.setattr(module, "configured", lambda _config: runtime)


def application() -> FastAPI:
    app = FastAPI()
    app.state.args = ARGUMENTS
    app.post("/v1/chat/completions")(lambda: None)
    app.post("/tokenize")(lambda: None)
    app.post("/a_path_of_somebody_else")(lambda: None)
    return app


def test_the_facts(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-of-the-variable")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    facts = asyncio.run(server_facts(application(), Engine(), ARGUMENTS))
    assert facts["unknown"] == []
    assert facts["model"]["names"] == ["<b>", "second"]
    assert facts["requests"] == {"path": "/v1/chat/completions", "endpoints": ["/v1/chat/completions", "/tokenize"]}
    assert facts["metrics"] == {"on": False}
    assert facts["device"] == {"name": "npu", "reason": "requested", "cards": 1}
    assert facts["options"] == [{"name": "npu.hub_token", "value": WITHHELD, "source": "BACKPLANE_NPU_HUB_TOKEN"}]
    [rank] = facts["ranks"]
    assert rank["operators"][0]["provider"] == "…/lib.so"
    assert rank["patches"] == [{"name": "p", "state": "applied"}]
    text = json.dumps(facts)
    for secret in ("sk-of", "hf_secret", "secret-place", "/opt/vendor", "key.pem"):
        assert secret not in text


class Broken(Engine):
    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        raise RuntimeError("the engine is busy")


class Slow(Engine):
    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        await asyncio.Event().wait()
        return []


@pytest.mark.parametrize("engine", [Broken(), Slow()])
def test_what_is_not_known_is_logged_and_the_rest_is_shown(
    engine: Engine, chosen: None, monkeypatch: pytest.MonkeyPatch, vllm_log: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(module, "FACT_SECONDS", 0.05)
    facts = asyncio.run(server_facts(application(), engine, ARGUMENTS))
    assert facts["unknown"] == ["ranks"]
    assert facts["model"]["context"] == 256
    [line] = vllm_log()
    assert "'ranks'" in line


@pytest.mark.parametrize(("path", "shown"), [("/v1/embeddings", None), ("/v1/completions", "/v1/completions")])
def test_the_page_talks_only_to_models_that_generate_text(chosen: None, path: str, shown: str | None) -> None:
    app = FastAPI()
    app.state.args = ARGUMENTS
    app.post(path)(lambda: None)
    facts = asyncio.run(server_facts(app, Engine(), ARGUMENTS))
    assert facts["requests"] == {"path": shown, "endpoints": [path]}
