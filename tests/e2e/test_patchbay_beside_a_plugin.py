"""Tests that vllm-patchbay works for the platform plugin of another vendor, and in an environment without vLLM.

Each test installs the wheel of vllm-patchbay with pip into an environment of its own. The first environment has the
vLLM and the PyTorch of this one, and not vllm-backplane.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import LlamaConfig

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "foreign_plugin"
TARGET = "vllm.entrypoints.llm:LLM.get_default_sampling_params"

ENGINE = """
import json, sys
from vllm import LLM
from vllm.platforms import current_platform

if __name__ == "__main__":
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=64, load_format="dummy")
    [answer] = engine.generate({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
    from foreign_npu.platform import session
    report = {
        "platform": type(current_platform).__name__,
        "tokens": list(answer.outputs[0].token_ids),
        "patches": session.summary(),
        "backplane": sorted(name for name in sys.modules if name.startswith("vllm_backplane")),
    }
    with open(sys.argv[2], "w") as file:
        json.dump(report, file)
"""


def run(command: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("BACKPLANE_", "VLLM_"))}
    keep.pop("PYTHONPATH", None)
    return subprocess.run(
        command,
        env={**keep, **changes},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def succeeded(command: list[str], **changes: str) -> str:
    done = run(command, **changes)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the wheel. It is built from a copy, because a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "patchbay", folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    succeeded(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(folder / "source"),
        ]
    )
    [built] = folder.glob("*.whl")
    return built


def environment(folder: Path, *options: str) -> Path:
    succeeded([sys.executable, "-m", "venv", *options, str(folder)])
    return folder / "bin" / "python"


def with_vllm(folder: Path) -> Path:
    """Returns the Python of an environment with links to everything installed here except our own distributions."""
    python = environment(folder, "--without-pip")
    here = Path(sysconfig.get_path("purelib"))
    there = Path(succeeded([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    for entry in here.iterdir():
        ours = entry.name.lower().replace("-", "_")
        if "vllm_backplane" in ours or "vllm_patchbay" in ours:
            continue
        (there / entry.name).symlink_to(entry)
    return python


def installed(python: Path) -> Mapping[str, str]:
    rows = json.loads(succeeded([str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]))
    return {row["name"]: row["version"] for row in rows}


def test_a_foreign_platform_runs_with_its_own_patch(wheel: Path, tmp_path: Path) -> None:
    python = with_vllm(tmp_path / "venv")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    succeeded([*pip, str(wheel)])
    patchbay = str(python.with_name("vllm-patchbay"))

    # The maintainer starts a patch with the tool, and fills in what it does.
    source = tmp_path / "foreign_plugin"
    shutil.copytree(PLUGIN, source)
    explained = ["--why", "The device answers briefly.", "--how", "Ends every answer after three tokens."]
    explained += ["--upstream", "none: a test", "--remove-when", "The device is faster."]
    place = ["--process", "platform", "--package", "foreign_npu.patches", "--root", str(source)]
    succeeded([patchbay, "new", TARGET, *place, *explained])
    patch = source / "foreign_npu" / "patches" / "platform" / "patch_llm.py"
    before = patch.read_text()
    after = before.replace("    return ", "    params = ", 1) + "    params.max_tokens = 3\n    return params\n"
    assert after != before
    patch.write_text(after)
    succeeded([*pip, "--no-build-isolation", str(source)])
    found = installed(python)
    assert "vllm-backplane" not in found and found["foreign-npu"] == "1.0"

    model = tmp_path / "model"
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, vocab_size=128,
    ).save_pretrained(model)  # fmt: skip
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    succeeded([str(python), str(script), str(model), str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["platform"] == "ForeignPlatform"
    assert report["tokens"] == [7, 7, 7], "the patch bounds an answer at three tokens; vLLM's default is sixteen"
    assert report["patches"] == ["llm_get_default_sampling_params applied"]
    assert report["backplane"] == []

    listed = json.loads(succeeded([patchbay, "list", "--json"]))
    assert [row["target"] for row in listed] == [TARGET]
    checked = json.loads(succeeded([patchbay, "check", "--json"]))
    assert [row["outcome"] for row in checked["patches"]] == ["fits"]
    audited = json.loads(succeeded([patchbay, "audit", str(source), "--json"]))
    assert audited["counts"].get("error", 0) == 0 and audited["files"] >= 4


BROKEN = """
from vllm.worker.gone import Worker


class Mine(Worker):
    pass
"""

UPSTREAM = {
    "vllm/__init__.py": "__version__ = '0.32.0'\n",
    "vllm/worker/__init__.py": "",
    "vllm/worker/here.py": "class Worker:\n    pass\n",
}


def test_it_audits_without_torch_and_vllm(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    succeeded([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    assert set(installed(python)) - {"pip", "setuptools"} == {"packaging", "vllm-patchbay"}
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "worker.py").write_text(BROKEN)
    for name, text in UPSTREAM.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    audit = [str(python), "-m", "vllm_patchbay", "audit", str(plugin), "--vllm", str(tmp_path / "tree"), "--json"]
    done = run(audit)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [(row["rule"], row["line"]) for row in report["findings"] if row["severity"] == "error"] == [("BP101", 2)]
