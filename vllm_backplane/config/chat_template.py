"""Refuses chat templates that take too long or too much memory to render.

vLLM's server renders the template in its own process, the first time when it starts, and before that examines whether
it loops over the parts of a message. A template comes with the checkpoint or from a file that somebody has published,
and may loop for ever, build a text of gigabytes, or be costly to examine. The templates are therefore examined and
rendered in a child process first, within limits for all of them together, with the same conversation, the variables of
the command line and the special tokens that the tokenizer's files name. A template that raises is left to vLLM, which
reports that. What a template does with other conversations is not checked, and neither are checkpoints from ModelScope.
The template and the variables of a command line are known where `vllm-backplane serve` parsed it, and not otherwise.
"""

from __future__ import annotations

import json
import logging
import mmap
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.guards import guarded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm." + __name__)  # vLLM configures handlers for its own logger tree only

SECONDS = 10
"""Processor time in which all templates must have rendered both forms of a message. Published ones take milliseconds.
"""
BYTES = 1 << 30
"""Memory that all templates may take for both forms of a message."""
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


@dataclass(slots=True)
class _CommandLine:
    """Holds what the command line of a server in this process gives."""

    template: str | None = None
    """The text of --chat-template, or of the file that it names."""
    variables: str = "{}"
    """The variables of --default-chat-template-kwargs, as JSON."""


_command_line = _CommandLine()


def set_command_line(template: str | None, variables: Mapping[str, Any]) -> None:
    """Sets the template and the variables that are checked besides the checkpoint's templates from now on."""
    _command_line.template, _command_line.variables = template, json.dumps(variables)


def require_bounded_template(config: VllmConfig) -> None:
    """Raises `CheckpointError` if the chat templates of a checkpoint cannot be rendered within limits, and
    `BackplaneError` if that of the command line cannot."""
    model = config.model_config
    if model is None or multiprocessing.parent_process() is not None:
        return
    folder = _folder_of(model.tokenizer or model.model, model.tokenizer_revision, model.hf_token)
    given, variables = _command_line.template, _command_line.variables
    tokens = tuple((_USUAL_TOKENS if folder is None else special_tokens(folder)).items())
    named = {} if folder is None else templates(folder)
    remedy = "" if variables == "{}" else "change --default-chat-template-kwargs, "
    if given is not None and (found := fault_of((given,), tokens, variables)):
        raise BackplaneError(
            f"the template of --chat-template {found[1]}; {remedy or 'correct it, '}or give another one"
        )
    if found := fault_of(tuple(named.values()), tokens, variables):
        place, fault = found
        described = getattr(model.hf_config, "quantization_config", None)
        is_gguf = isinstance(described, dict) and described.get("quant_method") == QUANTIZATION
        # The folder of a GGUF file was made from the file.
        source = model.hf_config.quantization_config["file"] if is_gguf else f"{folder}/{[*named][place]}"
        raise CheckpointError(
            f"the chat template in {source} {fault}; {remedy}choose another checkpoint, or one without a template and "
            "give one with --chat-template"
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
def fault_of(
    templates: tuple[str, ...], tokens: tuple[tuple[str, str], ...], variables: str = "{}"
) -> tuple[int, str] | None:
    """Returns the place of the template that exceeds the limits, alone or with those before it, and what is wrong with
    it, or None if all are rendered, or raise, within the limits."""
    for place, template in enumerate(templates):
        if len(template) > _CHARACTERS:
            return place, f"has {len(template)} characters, more than {_CHARACTERS}"
    if not templates:
        return None
    # Imported here, so that a release without them is an error of this process.
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: F401
    from vllm.renderers.hf import _detect_content_format  # noqa: F401

    reached = mmap.mmap(-1, 8)  # the child writes there which template it has reached
    child = os.fork()
    if child == 0:
        _examine_and_exit(templates, {**dict(tokens), **_VARIABLES, **json.loads(variables)}, reached)
    status = _wait(child)
    place = int.from_bytes(reached[:], "little")
    message = f"to render one message (templates before it included: {place})" if place else "to render one message"
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return place, f"takes more than {SECONDS} s {message}"
    if os.WIFSIGNALED(status):
        return place, f"ends the process that renders it with signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) == _UNCHECKED:
        raise BackplaneError(
            "the chat template could not be checked within limits of memory and time; raise the limits of this "
            "process (ulimit -v, ulimit -t)"
        )
    return (place, f"takes more than {BYTES >> 20} MiB {message}") if os.WEXITSTATUS(status) else None


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


def _examine_and_exit(templates: tuple[str, ...], variables: Mapping[str, Any], reached: mmap.mmap) -> None:
    """Examines and renders templates within limits, and ends this process with a status that states what came of it."""
    status = _UNCHECKED
    try:
        logging.disable()  # vLLM reports the errors of a template again
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + SECONDS)
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, virtual + BYTES)
        status = 0
        for step in _steps(templates, variables, reached):
            try:
                step()
            except MemoryError:
                status = _OUT_OF_MEMORY
                break
            except BaseException:  # the template refuses this conversation, or has an error; vLLM reports either
                continue
    finally:
        os._exit(status)


def _steps(
    templates: tuple[str, ...], variables: Mapping[str, Any], reached: mmap.mmap
) -> Iterator[Callable[[], object]]:
    """Yields what the server does with each template when it starts."""
    for place, template in enumerate(templates):
        reached[:] = place.to_bytes(8, "little")
        yield partial(_detect_format, template)
        for content in _CONTENTS:
            messages = [{"role": "user", "content": content}]
            yield partial(_render, template, {**variables, "messages": messages})


@guarded(
    "vllm.renderers.hf:_detect_content_format",
    why="the server calls it with the template of a checkpoint, so it is called before within limits",
)
def _detect_format(template: str) -> None:
    """Examines whether a template loops over the parts of a message, which may take longer than rendering it."""
    from vllm.renderers.hf import _detect_content_format

    _detect_content_format(template, default="string")


def _render(template: str, variables: Mapping[str, Any]) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).render(variables)


def _limit(kind: int, value: int) -> None:
    """Sets a limit of this process, unless it has a lower one."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, hard))
