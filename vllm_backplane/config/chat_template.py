"""Refuses a checkpoint whose chat template takes too long or too much memory to render.

vLLM's server renders the template in its own process, the first time when it starts. A template comes with the
checkpoint, and may loop for ever or build a text of gigabytes. The templates are therefore rendered in a child process
first, within limits, with the same conversation and with the special tokens that the tokenizer's files name. A template
that raises is left to vLLM, which reports that. What a template does with other conversations is not checked, and
neither are checkpoints from ModelScope.
"""

from __future__ import annotations

import json
import logging
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
from vllm_backplane.gguf.hf_config import QUANTIZATION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

SECONDS = 10
"""Processor time in which a template must have rendered both forms of a message. Published ones take milliseconds."""
BYTES = 1 << 30
"""Memory that a template may take for both forms of a message."""
_CHARACTERS = 1 << 20
"""Length limit of a template. Published templates have some thousand characters."""
_OUT_OF_MEMORY, _UNCHECKED = 3, 4
"""Exit statuses of the child process."""
_FILES = ("tokenizer_config.json", "processor_config.json", "chat_template.json")
"""Files whose key "chat_template" has a template."""
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Patterns of the files that are a template."""
_FILE_BYTES = 1 << 28
"""Size limit of these files, in which some models list their vocabulary."""
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name special tokens. The second is ignored if the first has the key "added_tokens_decoder"."""
_VARIABLES: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
"""The variables besides messages and special tokens with which vLLM's server renders the template when it starts."""
_CONTENTS: tuple[object, ...] = ("warmup", [{"type": "text", "text": "warmup"}])
"""The content of the message with which vLLM's server renders the template when it starts: vLLM passes parts to a
template that seems to loop over the content, and text to any other one."""
_USUAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""Tokens for a tokenizer whose files do not mention them: its class may define them."""


def require_bounded_template(config: VllmConfig) -> None:
    """Raises `CheckpointError` if the chat template of a checkpoint cannot be rendered within limits."""
    model = config.model_config
    if model is None or multiprocessing.parent_process() is not None:
        return
    folder = _folder_of(model.tokenizer or model.model, model.tokenizer_revision, model.hf_token)
    if folder is None:
        return
    tokens = tuple(special_tokens(folder).items())
    for name, template in templates(folder).items():
        fault = fault_of(template, tokens)
        if fault is not None:
            described = getattr(model.hf_config, "quantization_config", None)
            is_gguf = isinstance(described, dict) and described.get("quant_method") == QUANTIZATION
            # The folder of a GGUF file was made from the file.
            source = model.hf_config.quantization_config["file"] if is_gguf else folder / name
            raise CheckpointError(
                f"the chat template in {source} {fault}; choose another checkpoint, or one without a template and give "
                "one with --chat-template"
            )


def _folder_of(name: str, revision: str | None, token: bool | str | None) -> Path | None:
    """Returns a local folder with the templates of a checkpoint, which is downloaded for a name on the hub, or None if
    that is not possible. vLLM downloads the same files a moment later."""
    if Path(name).exists():
        return Path(name)
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        return None
    from huggingface_hub import snapshot_download

    patterns = [*_TEMPLATE_FILES, *_FILES, *_TOKEN_FILES]
    try:
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # vLLM reports what is wrong with the name or the network
        reason = str(error).partition("\n")[0]
        logger.warning("The chat template of %s is not checked, because it could not be downloaded: %s", name, reason)
        return None


def templates(folder: Path) -> dict[str, str]:
    """Returns the chat templates of a folder by the name of their file."""
    found: dict[str, str] = {}
    for file in (path for pattern in _TEMPLATE_FILES for path in sorted(folder.glob(pattern))):
        if _is_small(file):
            found[str(file.relative_to(folder))] = file.read_text(encoding="utf-8", errors="replace")
    for file in (folder / name for name in _FILES if _is_small(folder / name)):
        given = _content(file).get("chat_template")
        named = given if isinstance(given, list) else [{"template": given}]
        for one in named:
            if isinstance(one, dict) and isinstance(one.get("template"), str):
                found[f"{file.name}{' ' + str(one['name']) if 'name' in one else ''}"] = one["template"]
    return found


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a tokenizer by the name that its templates use, as far as its files name them."""
    given, more = (_content(folder / name) if _is_small(folder / name) else {} for name in _TOKEN_FILES)
    if "added_tokens_decoder" not in given:
        given = given | more
    entries: dict[Any, Any] = {name: token for name, token in given.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):  # a list has tokens without a name
        if isinstance(given.get(key), dict):
            entries |= given[key]
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries.items()}
    # A null in a file takes a token away that the tokenizer's class defines.
    return {name: token for name, token in {**_USUAL_TOKENS, **contents}.items() if isinstance(token, str)}


def _content(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if there is none. vLLM reports what is wrong with the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_small(file: Path) -> bool:
    """Returns whether a path is a regular file of a size that can be read. vLLM reports other ones."""
    return file.is_file() and file.stat().st_size <= _FILE_BYTES


@cache
def fault_of(template: str, tokens: tuple[tuple[str, str], ...]) -> str | None:
    """Returns what is wrong with a template, or None if it is rendered, or raises, within the limits."""
    if len(template) > _CHARACTERS:
        return f"has {len(template)} characters, more than {_CHARACTERS}"
    # Imported here, so that a transformers without it is an error of this process.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    child = os.fork()
    if child == 0:
        variables = {**dict(tokens), **_VARIABLES}
        _render_and_exit(
            lambda content: _compile_jinja_template(template).render(
                {**variables, "messages": [{"role": "user", "content": content}]}
            )
        )
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


def _render_and_exit(render: Callable[[object], object]) -> None:
    """Calls a function with each form of the content within limits, and ends this process with a status that states
    what came of it."""
    status = _UNCHECKED
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + SECONDS)
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, virtual + BYTES)
        status = 0
        for content in _CONTENTS:
            try:
                render(content)
            except MemoryError:
                status = _OUT_OF_MEMORY
                break
            except BaseException:  # the template refuses this conversation, or has an error; vLLM reports either
                continue
    finally:
        os._exit(status)


def _limit(kind: int, value: int) -> None:
    """Sets a limit of this process, unless it has a lower one."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, hard))
