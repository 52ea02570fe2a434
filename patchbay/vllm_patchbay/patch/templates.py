"""Holds the templates of the files that ``vllm-patchbay new`` writes: a patch of each kind of target, and its two
tests.

The tests hold for any patch: that it replaces its target and restores it, and that an engine runs with it. They need
vLLM, pytest and Patchbay, and nothing of a particular plugin. Tests of the patch's purpose are left to its author.
"""

from __future__ import annotations

PATCH = '''"""Patches {target}.

{why_line}
"""

from __future__ import annotations

from vllm_patchbay.patch import Patch, Process

{declaration}
'''

FIELDS = """Patch(
    target="{target}",
    process=Process.{process},
    versions=">={low},<{high}",
    why={why},
    how={how},
    upstream={upstream},
    remove_when={remove_when},
    fingerprints={{
        "{version}": (
{fingerprint}
        ),
    }},{on_import}
)"""

FUNCTION = """
@{fields}
{keyword} {name}({parameters}):  # type: ignore[no-untyped-def]
    return {call}{name}.original({parameters})
"""

CLASS = """
@{fields}
def {name}(original):  # type: ignore[no-untyped-def]
    class Patched(original):  # type: ignore[misc]
        pass

    return Patched
"""

CONSTANT = """
{name} = {fields}.value("{name}", {value}, __name__)
"""

READ = """saved, {name}.original = {name}.original, lambda self: ("read from", self)
assert vars(owner)[attribute].__get__(session, owner) == ("read from", session)
{name}.original = saved
"""

UNIT = '''"""Tests the patch {name} without an engine."""

from __future__ import annotations

import os
import subprocess
import sys

from {package}.{process}.patch_{module} import {name}
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree

APPLY_AND_UNDO = """
from {package}.{process}.patch_{module} import {name}
from vllm_patchbay.patch import PatchSession, PatchSet
from vllm_patchbay.patch.rebinding import find_target

session = PatchSession.for_installed_vllm()
owner, attribute, before = find_target({name})
session.apply(PatchSet(({name},)), {name}.process)
assert "{name}" in session.rebindings
assert {name}.original is not None
{read}session.undo()
assert vars(owner)[attribute] is before
print("applied and undone")
"""


def test_it_fits_the_installed_vllm() -> None:
    tree = installed_tree()
    verdict = verify({name}, SymbolIndex(tree), tree.version)
    assert verdict.outcome is Outcome.FITS, verdict.detail


def test_it_replaces_its_target_and_restores_it() -> None:
    """In a process of its own, without plugins: one of them may apply the patch too."""
    done = subprocess.run(
        [sys.executable, "-c", APPLY_AND_UNDO],
        env={{**os.environ, "VLLM_PLUGINS": ""}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("applied and undone"), done.stderr
'''

E2E = '''"""Tests the patch {name} in a running engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

MODEL = {{
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}}
"""A small Llama with random weights and without a tokenizer. Every attention backend supports its head size."""

ENGINE = """
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
    )
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    [output] = engine.generate([{{"prompt_token_ids": [3, 4, 5]}}], sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
"""


def test_an_engine_runs_with_it(tmp_path: Path) -> None:
    script, model = tmp_path / "engine.py", tmp_path / "model"
    script.write_text(ENGINE)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    command = [sys.executable, str(script), str(model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\\b{name} applied\\b", done.stdout), done.stdout[-4000:]
'''
