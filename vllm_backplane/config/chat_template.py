"""Refuses a checkpoint whose chat template takes too long or too much memory to render.

vLLM's server renders the template in its own process, the first time when it starts. A template comes with the
checkpoint, and may loop for ever or build a text of gigabytes. The templates of a local folder are therefore rendered
in a child process first, within limits and with the same conversation. A template that raises is left to vLLM, which
reports that. Names on a hub are not checked, and neither is what a template does with other conversations.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.errors import BackplaneError, CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = 10
"""Processor time in which a template must have rendered one message. Published templates take milliseconds."""
BYTES = 1 << 30
"""Memory that a template may take for one message."""
_CHARACTERS = 1 << 20
"""Length limit of a template. Published templates have some thousand characters."""
_OUT_OF_MEMORY, _UNCHECKED = 3, 4
"""Exit statuses of the child process."""
_FILES = ("tokenizer_config.json", "processor_config.json", "chat_template.json")
"""Files whose key "chat_template" has a template."""
_FILE_BYTES = 1 << 28
"""Size limit of these files, in which some models list their vocabulary."""
_VARIABLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "warmup"}],
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
}
"""The conversation with which vLLM's server renders the template when it starts."""


def require_bounded_template(config: VllmConfig) -> None:
    """Raises `CheckpointError` if the chat template in a model's folder cannot be rendered within limits."""
    model = config.model_config
    if model is None or multiprocessing.parent_process() is not None:
        return
    folder = Path(model.tokenizer or model.model)
    for name, template in templates(folder).items():
        fault = fault_of(template)
        if fault is not None:
            described = getattr(model.hf_config, "quantization_config", None)
            is_gguf = isinstance(described, dict) and described.get("quant_method") == "gguf"
            # The folder of a GGUF file was made from the file.
            source = model.hf_config.quantization_config["file"] if is_gguf else folder / name
            raise CheckpointError(
                f"the chat template in {source} {fault}; choose another checkpoint, or one without a template and give "
                "one with --chat-template"
            )


def templates(folder: Path) -> dict[str, str]:
    """Returns the chat templates of a local folder by the name of their file. A name on a hub has none here."""
    found: dict[str, str] = {}
    if not folder.is_dir():
        return found
    for file in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if _is_small(file):
            found[str(file.relative_to(folder))] = file.read_text(encoding="utf-8", errors="replace")
    for file in (folder / name for name in _FILES if _is_small(folder / name)):
        try:
            given = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # vLLM reports what is wrong with the file
            continue
        named = given if isinstance(given, list) else [{"template": given}]
        for one in named:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                found[f"{file.name}{' ' + str(one['name']) if 'name' in one else ''}"] = one["template"]
    return found


def _is_small(file: Path) -> bool:
    """Returns whether a path is a regular file of a size that can be read. vLLM reports other ones."""
    return file.is_file() and file.stat().st_size <= _FILE_BYTES


@cache
def fault_of(template: str) -> str | None:
    """Returns what is wrong with a template, or None if it is rendered, or raises, within the limits."""
    if len(template) > _CHARACTERS:
        return f"has {len(template)} characters, more than {_CHARACTERS}"
    # Imported here, so that a transformers without it is an error of this process.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    child = os.fork()
    if child == 0:
        _render_and_exit(lambda: _compile_jinja_template(template).render(**_VARIABLES))
    status = _wait(child)
    if status is None:
        return f"takes more than {SECONDS} s to render one message"
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGXCPU:
            return f"takes more than {SECONDS} s to render one message"
        return f"ends the process that renders it with signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) == _UNCHECKED:
        raise BackplaneError(
            "the chat template could not be checked within limits of memory and time; raise the limits of this "
            "process (ulimit -v, ulimit -t)"
        )
    return f"takes more than {BYTES >> 20} MiB to render one message" if os.WEXITSTATUS(status) else None


def _wait(child: int) -> int | None:
    """Returns the status of a child, or None after ending one that waits for something for too long."""
    end = time.monotonic() + 6 * SECONDS  # a limit for a process that does not compute, whose processor time stands
    pause = 0.001
    try:
        while time.monotonic() < end:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                child = 0
                return status
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _render_and_exit(render: Callable[[], object]) -> None:
    """Calls a function within limits, and ends this process with a status that states what came of it."""
    status = _UNCHECKED
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + SECONDS)
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, virtual + BYTES)
        status = 0
        render()
    except MemoryError:
        status = _OUT_OF_MEMORY
    except BaseException:  # the template refuses this conversation, or has an error; vLLM reports either
        pass
    finally:
        os._exit(status)


def _limit(kind: int, value: int) -> None:
    """Sets a limit of this process, unless it has a lower one."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, hard))
