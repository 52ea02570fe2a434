"""Collects what the page shows of a server and what stays the same while it runs.

Only what is listed here leaves the server. Values of options that may be secret are left out, and paths are reduced to
their last part.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch

from vllm_backplane import __version__
from vllm_backplane.config.start_report import format_of, size_on_disk
from vllm_backplane.http.served_addresses import CHAT, COMPLETIONS, answers, path_of_request
from vllm_backplane.runtime import configured
from vllm_backplane.safe_text import safe
from vllm_backplane.settings import compat

logger = logging.getLogger("vllm." + __name__)

FACT_SECONDS = 10.0
"""Seconds after which a fact counts as unknown."""
WITHHELD = "set; the value is not shown"
ENDPOINTS = (
    CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v1/audio/transcriptions", "/v1/audio/translations", "/tokenize",
    "/detokenize",
)  # fmt: skip
"""Paths that take requests for a model, of those that vLLM has. A server offers some of them."""

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_FOLDERS = re.compile(r"(?<![\w.])(?:/[^/\s,;:'\"]+)+/")
"""The folders of an absolute path within a text."""


async def server_facts(app: Any, engine: Any, args: Any) -> dict[str, Any]:
    """Returns the facts. A group that cannot be found out is logged, and listed under `unknown`."""
    facts: dict[str, Any] = {"unknown": []}
    for name, find in _GROUPS.items():
        try:
            facts[name] = await asyncio.wait_for(find(app, engine, args), FACT_SECONDS)
        except Exception:
            facts["unknown"].append(name)
            logger.warning("The page does not show %r of this server, because of an error.", name, exc_info=True)
    return facts


async def _versions(_app: Any, _engine: Any, _args: Any) -> dict[str, str]:
    return {
        "vllm-backplane": __version__,
        "vLLM": compat.vllm_version(),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
    }


async def _device(_app: Any, engine: Any, _args: Any) -> dict[str, Any]:
    chosen = configured(engine.vllm_config.additional_config)
    return {
        "name": chosen.device.name,
        "reason": without_folders(chosen.selection.reason),
        "cards": chosen.selection.probe.count,
    }


async def _model(_app: Any, engine: Any, args: Any) -> dict[str, Any]:
    model = engine.vllm_config.model_config
    given = args.served_model_name or [args.model]
    return {
        "names": [without_folders(name) for name in ([given] if isinstance(given, str) else given)],
        "format": format_of(model),
        "bytes": size_on_disk(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": model.max_model_len,
    }


async def _requests(app: Any, engine: Any, _args: Any) -> dict[str, Any]:
    """Returns the paths that take requests, and the one with which the page talks to the model, if there is one."""
    path = await path_of_request(app, engine)
    return {
        "path": path if path in (CHAT, COMPLETIONS) else None,
        "endpoints": [path for path in ENDPOINTS if answers(app, path, "POST")],
    }


async def _metrics(_app: Any, _engine: Any, args: Any) -> dict[str, bool]:
    return {"on": not args.disable_log_stats}


async def _ranks(_app: Any, engine: Any, _args: Any) -> list[dict[str, Any]]:
    """Returns how each rank describes itself. The operators are those of the first one, and all ranks have the same."""
    described: list[dict[str, Any]] = await engine.collective_rpc("backplane_facts")
    for rank in described:
        for line in rank["operators"]:
            line["provider"] = without_folders(line["provider"])
        rank["patches"] = [dict(zip(("name", "state"), one.split(" ", 1), strict=True)) for one in rank["patches"]]
    return [described[0], *({**rank, "operators": []} for rank in described[1:])]


async def _configuration(_app: Any, engine: Any, _args: Any) -> list[tuple[str, str]]:
    """Returns the parts of vLLM's configuration that decide about speed and capacity, by name."""
    config = engine.vllm_config
    cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
    lora, speculative = config.lora_config, config.speculative_config
    found = {
        "KV cache, tokens": getattr(cache, "kv_cache_size_tokens", None),
        "KV cache, blocks": cache.num_gpu_blocks,
        "KV cache, tokens per block": cache.block_size,
        "KV cache, type": cache.cache_dtype,
        "prefix caching": cache.enable_prefix_caching,
        "sequences per step, at most": scheduler.max_num_seqs,
        "tokens per step, at most": scheduler.max_num_batched_tokens,
        "async scheduling": scheduler.async_scheduling,
        "graphs": getattr(config.compilation_config.cudagraph_mode, "name", None),
        "tensor parallel": parallel.tensor_parallel_size,
        "pipeline parallel": parallel.pipeline_parallel_size,
        "data parallel": parallel.data_parallel_size,
        "LoRA adapters, at most": None if lora is None else lora.max_loras,
        "speculation": None if speculative is None else speculative.method,
        "draft tokens": None if speculative is None else speculative.num_speculative_tokens,
        "sleep mode": config.model_config.enable_sleep_mode,
    }
    return [(name, _text(value)) for name, value in found.items() if value is not None]


async def _options(_app: Any, engine: Any, _args: Any) -> list[dict[str, str]]:
    """Returns the options of Backplane and of its devices that differ from their defaults."""
    settings = configured(engine.vllm_config.additional_config).settings
    return [
        {"name": setting.path, "value": shown_value(setting.option.key, setting.value), "source": setting.source}
        for scope in settings.values()
        for setting in scope.values()
        if setting.value != setting.option.default
    ]


def shown_value(name: str, value: Any) -> str:
    """Returns the value of an option as a text without secrets and folders."""
    if _SECRET.search(name):
        return WITHHELD
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {shown_value(str(key), part)}" for key, part in value.items())
    return without_folders(_text(value))


def without_folders(text: str) -> str:
    """Returns a text with each absolute path reduced to its last part."""
    return safe(_FOLDERS.sub("…/", text))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


_GROUPS: Mapping[str, Callable[[Any, Any, Any], Awaitable[Any]]] = {
    "versions": _versions,
    "device": _device,
    "model": _model,
    "requests": _requests,
    "metrics": _metrics,
    "ranks": _ranks,
    "configuration": _configuration,
    "options": _options,
}
