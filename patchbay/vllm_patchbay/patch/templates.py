"""The texts that `patches new` fills in: a patch by the kind of its target, and its two tests.

The tests hold for any patch: that it takes its target's place, alone and in a running engine. What the patch is for is
left to its author to test beside them.
"""

from __future__ import annotations

PATCH = '''"""{target}: {why_line}"""

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

READ = """before_it, {name}.original = {name}.original, lambda self: ("read from", self)
assert vars(owner)[attribute].__get__(session, owner) == ("read from", session)
{name}.original = before_it
"""

UNIT = '''"""The patch {name}, by itself."""

from __future__ import annotations

import subprocess
import sys

from {package}.{process}.patch_{module} import {name}
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree

APPLIED = """
from {package}.{process}.patch_{module} import {name}
from vllm_patchbay.patch import PatchSet, PatchSession
from vllm_patchbay.patch.rebinding import find
from vllm_patchbay.upstream import SymbolIndex, installed_tree

tree = installed_tree()
session = PatchSession(lambda: SymbolIndex(tree), tree.version)
owner, attribute, before = find({name})
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


def test_it_takes_its_targets_place_and_gives_it_back() -> None:
    """In a process of its own: this one may have applied it already."""
    done = subprocess.run([sys.executable, "-c", APPLIED], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("applied and undone"), done.stderr
'''

E2E = '''"""The patch {name}, in a running engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from vllm_backplane.models import obtain

ENGINE = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(sys.argv[1], max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128)
    print(engine.generate("One, two,", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids)
"""


def test_an_engine_runs_with_it(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(obtain("smollm2-fp32"))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\\b{name} applied\\b", done.stdout), done.stdout[-4000:]
'''
