"""Refuses a checkpoint whose chat template takes too long or too much memory to render.

vLLM's server renders the template in its own process, the first time when it starts. A template comes with the
checkpoint, and may loop for ever or build a text of gigabytes. It is therefore rendered once in a child process, within
limits. A template that raises is left to vLLM, which reports that to the user of the chat.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.errors import CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = 10
"""Processor time in which a template must have rendered one message. Published templates take milliseconds."""
BYTES = 1 << 30
"""Memory that a template may take for one message."""
_CHARACTERS = 1 << 20
"""Length limit of a template. Published templates have some thousand characters."""
_OUT_OF_MEMORY = 3
_VARIABLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def require_bounded_template(config: VllmConfig) -> None:
    """Raises `CheckpointError` if the chat template in a model's folder cannot be rendered within limits."""
    model = config.model_config
    if model is None or multiprocessing.parent_process() is not None:
        return
    folder = Path(model.tokenizer or model.model)
    for name, template in templates(folder).items():
        fault = fault_of(template)
        if fault is not None:
            raise CheckpointError(
                f"the chat template in {folder / name} {fault}; give another one with --chat-template, and remove it "
                "from the folder, or choose another model"
            )


def templates(folder: Path) -> dict[str, str]:
    """Returns the chat templates of a local folder by the name of their file. A name on a hub has none here."""
    found: dict[str, str] = {}
    if not folder.is_dir():
        return found
    if (file := folder / "chat_template.jinja").is_file():
        found[file.name] = file.read_text(encoding="utf-8", errors="replace")
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        try:
            given = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # vLLM reports what is wrong with the file
            continue
        named = given if isinstance(given, list) else [{"template": given}]
        for one in named:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                found[f"{file.name}{' ' + str(one['name']) if 'name' in one else ''}"] = one["template"]
    return found


@cache
def fault_of(template: str) -> str | None:
    """Returns what is wrong with a template, or None if it is rendered, or raises, within the limits."""
    if len(template) > _CHARACTERS:
        return f"has {len(template)} characters, more than {_CHARACTERS}"
    child = os.fork()
    if child == 0:
        _render_and_exit(template)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
            return f"takes more than {SECONDS} s to render one message"
        return f"ends the process that renders it with signal {os.WTERMSIG(status)}"
    return f"takes more than {BYTES >> 20} MiB to render one message" if os.WEXITSTATUS(status) else None


def _render_and_exit(template: str) -> None:
    """Renders a template within limits, as transformers does, and ends this process."""
    status = 0
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        used = sum(os.times()[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, int(used) + SECONDS + 1))
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (virtual + BYTES, virtual + BYTES))
        import jinja2.ext
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = str
        environment.from_string(template).render(**_VARIABLES)
    except MemoryError:
        status = _OUT_OF_MEMORY
    except BaseException:  # the template refuses this conversation, or has an error; vLLM reports either
        status = 0
    finally:
        os._exit(status)


def _raise(message: str) -> None:
    raise ValueError(message)
