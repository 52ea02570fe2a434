"""Runs the real command with one mistake each: it ends at once, with one line that names the remedy, and status 2.

In every run the import of torch or vLLM would end the process with another status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.environment import AT_START
from tests.ports import free_port

pytestmark = pytest.mark.process

COMMAND = Path(sys.executable).with_name("vllm-backplane")
IMPORTED = 99
INTERRUPT = "INTERRUPT_AT_IMPORT"
GUARD = f"""\
import os, signal, sys

def guard(event, arguments):
    if event == "import" and arguments[0] == os.environ.get("{INTERRUPT}"):
        os.kill(os.getpid(), signal.SIGINT)
    if event == "import" and arguments[0] in ("torch", "vllm", "transformers"):
        os.write(2, f"{{arguments[0]}} is imported\\n".encode())
        os._exit({IMPORTED})

sys.addaudithook(guard)
"""
OFFLINE: dict[str, str | None] = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Mistake:
    """Describes a command line with a mistake, which may use the names of `Place` in braces."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    """Parts of the one line that is printed."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables; None removes one."""


def given(*arguments: str) -> tuple[str, ...]:
    return arguments


MISTAKES = {
    # the model
    "path that does not exist": Mistake(
        given("./model"), ("./model does not exist", "give the folder or the GGUF file")
    ),
    "path with a typing error": Mistake(given("{here}/modle"), ("{here}/modle does not exist; did you mean 'model'?",)),
    "path in a folder that does not exist": Mistake(
        given("{here}/there/model"), ("does not exist, nor does {here}/there", "({here} exists)")
    ),
    "empty folder": Mistake(given("{here}/empty"), ("the folder {here}/empty is empty", "download the model again")),
    "folder without a model": Mistake(
        given("{here}"), ("is not a model: it has no config.json and no GGUF file; did you mean {here}/broken?",)
    ),
    "folder without weights": Mistake(given("{here}/config-only"), ("has no weights", "--load-format dummy")),
    "configuration that is not JSON": Mistake(given("{here}/broken"), ("config.json is not JSON: ", "line 1 column 2")),
    "adapter": Mistake(given("{here}/adapter"), ("is a LoRA adapter", "--lora-modules NAME={here}/adapter")),
    "weights that were not fetched": Mistake(given("{here}/pointer"), ("is a pointer of Git LFS", "git lfs pull")),
    "file that is no GGUF file": Mistake(
        given("{here}/file/text.gguf"), ("is not a GGUF file (it begins with b'not a m",)
    ),
    "one file of a model": Mistake(given("{here}/model/model.safetensors"), ("give its folder: {here}/model",)),
    "weights beyond the memory": Mistake(
        given("{here}/giant"), ("the weights of {here}/giant take at least 65536.0 GiB, and ", "choose a smaller model")
    ),
    "misspelt bundled model": Mistake(
        given("smolm2"), ("'smolm2' is not a bundled model", "did you mean 'smollm2'?"), OFFLINE
    ),
    "name of the hub, offline": Mistake(
        given("Qwen/Qwen3-0.6B"),
        ("not in the cache of the hub, and HF_HUB_OFFLINE forbids to look it up; unset HF_HUB_OFFLINE",),
        OFFLINE,
    ),
    "name of the hub, without a network": Mistake(
        given("Qwen/Qwen3-0.6B"),
        ("127.0.0.1:{closed} cannot be reached (", "check the network, or give the path of a model"),
        {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:{closed}"},
    ),
    "name that the hub does not have": Mistake(
        given("Qwen/Qwen33"),
        ("127.0.0.1:{hub} has no such model; correct the name, or set HF_TOKEN",),
        {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:{hub}"},
    ),
    # the device and the address
    "unknown device": Mistake(given("--device", "cpuu"), ("'cpuu', which no installed", "did you mean 'cpu'?")),
    "port in use": Mistake(
        given("--port", "{used}"), ("port {used} of 127.0.0.1 is in use by process {pid} (", "with --port")
    ),
    "address of another machine": Mistake(
        given("--host", "192.0.2.1"), ("--host 192.0.2.1 is not an address of this machine; use 127.0.0.1",)
    ),
    # options of vLLM
    "option of the command with a typing error": Mistake(
        given("smollm2", "--devic", "cpu"), ("unknown option --devic; did you mean --device?",)
    ),
    "option of vLLM that does not exist": Mistake(
        given("smollm2", "--max-model-length", "8"),
        ("unknown option --max-model-length; did you mean --max-model-len?",),
    ),
    "value that is missing": Mistake(
        given("smollm2", "--max-model-len"), ("--max-model-len: a value is missing after it",)
    ),
    "value that is not a number": Mistake(
        given("smollm2", "-tp", "two"), ("--tensor-parallel-size: 'two' is not a whole number",)
    ),
    "value out of range": Mistake(
        given("smollm2", "--gpu-memory-utilization", "7"),
        ("--gpu-memory-utilization: 7 is out of its range; give a number that is at most 1",),
    ),
    "IO processor with a typing error": Mistake(
        given("minilm", "--io-processor-plugin", "backplane_document"),
        ("'backplane_document', which no installed", "did you mean 'backplane_documents'?"),
    ),
    "IO processor that is not loaded": Mistake(
        given("minilm", "--io-processor-plugin", "backplane_documents"),
        ("VLLM_PLUGINS is 'backplane', with which", "set it to backplane,backplane_documents"),
        {"VLLM_PLUGINS": "backplane"},
    ),
    "value that is no choice": Mistake(
        given("smollm2", "--convert", "embedd"), ("'embedd' is not one of its values; did you mean 'embed'?",)
    ),
    "malformed JSON": Mistake(
        given("smollm2", "--speculative-config", '{"method": ngram}'),
        ("--speculative-config: ", "is not JSON: expecting value at line 1, column 12"),
    ),
    "JSON without its quotes": Mistake(
        given("smollm2", "--speculative-config={method:ngram}"), ("JSON has double quotes, which a shell keeps",)
    ),
    "key that does not exist": Mistake(
        given("smollm2", "--compilation-config.mod", "3"),
        ("--compilation-config: unknown key 'mod'; did you mean 'mode'?",),
    ),
    "second model": Mistake(given("smollm2", "minilm"), ("unexpected argument 'minilm'",)),
    "configuration file that is not YAML": Mistake(
        given("--config", "{here}/bad.yaml"), ("--config {here}/bad.yaml, line 2, column 8: this is not YAML",)
    ),
    "unknown option in a configuration file": Mistake(
        given("smollm2", "--config", "{here}/unknown.yaml"), ("{here}/unknown.yaml: unknown option --max-modl-len",)
    ),
    # options of Backplane
    "unknown option of Backplane": Mistake(
        given("smollm2", "--additional-config", '{"backplane": {"memory_shar": 0.5}}'),
        ("unknown option 'memory_shar'", "did you mean 'memory_share'?"),
    ),
    "section with a typing error": Mistake(
        given("smollm2", "--additional-config", '{"backplan": {}}'),
        ("a section 'backplan'; did you mean 'backplane'?",),
    ),
    "variable with a bad value": Mistake(
        given("smollm2"), ("BACKPLANE_MEMORY_SHARE is 'much'; expected a number",), {"BACKPLANE_MEMORY_SHARE": "much"}
    ),
}

SECOND_VARIANTS = (
    "path in a folder that does not exist",
    "adapter",
    "one file of a model",
    "weights that were not fetched",
    "name that the hub does not have",
    "JSON without its quotes",
    "second model",
    "section with a typing error",
)
"""Mistakes of which another of the same kind runs in `make test`."""


class _Nothing(BaseHTTPRequestHandler):
    """Answers as a hub that has no model."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Creates folders and files of models that cannot be served, a port in use, and a hub."""
    here = tmp_path_factory.mktemp("models")
    files: dict[str, str | bytes] = {
        "config-only/config.json": "{}",
        "broken/config.json": "{architectures}",
        "adapter/adapter_config.json": "{}",
        "pointer/config.json": "{}",
        "pointer/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "file/text.gguf": "not a model",
        "model/config.json": "{}",
        "model/model.safetensors": b"\x02" + bytes(7) + b"{}",
        "giant/config.json": "{}",
        "bad.yaml": "model: smollm2\nport: a: b\n",
        "unknown.yaml": "max-modl-len: 2048\n",
        "good.yaml": "max-model-len: 2048\n",
    }
    for name, content in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "empty").mkdir()
    size = 1 << 46
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [size >> 1], "data_offsets": [0, size]}}).encode()
    with (here / "giant" / "model.safetensors").open("wb") as giant:
        giant.write(len(header).to_bytes(8, "little") + header)
        giant.truncate(1 << 41)  # a file system may not have larger files, and the header counts
    hub = HTTPServer(("127.0.0.1", 0), _Nothing)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    (here / "guard").mkdir()
    (here / "guard" / "sitecustomize.py").write_text(GUARD)
    with socket.create_server(("127.0.0.1", free_port())) as used:
        yield {
            "here": here,
            "pid": os.getpid(),
            "used": used.getsockname()[1],
            "closed": free_port(),
            "hub": hub.server_address[1],
            "free": free_port(),
        }
    hub.shutdown()
    hub.server_close()


def run(place: Mapping[str, object], mistake: Mistake) -> subprocess.CompletedProcess[str]:
    environment = {**AT_START, "HF_HOME": f"{place['here']}/hf", "PYTHONPATH": f"{place['here']}/guard"}
    for name in ("BACKPLANE_DEVICE", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        environment.pop(name, None)
    for name, value in mistake.variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value.format(**place)
    # JSON has braces too; only known names are replaced.
    arguments = [_filled(argument, place) for argument in mistake.arguments]
    port = [] if "--port" in arguments else ["--port", str(place["free"])]
    return subprocess.run(
        [str(COMMAND), "serve", *arguments, *port],
        capture_output=True,
        text=True,
        env=environment,
        cwd=str(place["here"]) + "/empty",
        timeout=60,
    )


def _filled(text: str, place: Mapping[str, object]) -> str:
    for name, value in place.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SECOND_VARIANTS)) for name in MISTAKES]
)
def test_a_mistake_costs_one_line(name: str, place: Mapping[str, object]) -> None:
    mistake = MISTAKES[name]
    done = run(place, mistake)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("vllm-backplane: error: ") and done.stderr.count("\n") == 1, done.stderr
    missing = [words for words in (_filled(words, place) for words in mistake.words) if words not in done.stderr]
    assert not missing, (missing, done.stderr)


def test_what_has_no_mistake_gets_as_far_as_vllm(place: Mapping[str, object]) -> None:
    done = run(place, Mistake(given("{here}/model", "--max-model-len", "2k", "--no-enable-prefix-caching"), ()))
    assert done.returncode == IMPORTED, (done.returncode, done.stderr)
    assert "is imported" in done.stderr


@pytest.mark.parametrize(
    "module",
    ["argparse", "vllm_backplane.cli.serve", "vllm_backplane.doctor", "yaml", "vllm"],
)
def test_ctrl_c_during_an_import_prints_nothing(module: str, place: Mapping[str, object]) -> None:
    arguments = ("{here}/model", "--config", "{here}/good.yaml")
    done = run(place, Mistake(arguments, (), {INTERRUPT: module}))
    assert (done.returncode, done.stdout, done.stderr) in ((-signal.SIGINT, "", ""), (128 + signal.SIGINT, "", ""))


def test_enough_mistakes_are_tested() -> None:
    assert len(MISTAKES.keys() - set(SECOND_VARIANTS)) >= 25
