"""The patch maybe_override_with_speculators, by itself."""

from __future__ import annotations

from tests import programs
from vllm_backplane.patches.platform.patch_gguf_model import maybe_override_with_speculators
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree

APPLIED = """
from vllm_backplane.patches.platform.patch_gguf_model import maybe_override_with_speculators
from vllm_patchbay.patch import PatchSet, PatchSession
from vllm_patchbay.patch.rebinding import find
from vllm_patchbay.upstream import SymbolIndex, installed_tree

tree = installed_tree()
session = PatchSession(lambda: SymbolIndex(tree), tree.version)
owner, attribute, before = find(maybe_override_with_speculators)
session.apply(PatchSet((maybe_override_with_speculators,)), maybe_override_with_speculators.process)
assert "maybe_override_with_speculators" in session.rebindings
assert maybe_override_with_speculators.original is not None
session.undo()
assert vars(owner)[attribute] is before
print("applied and undone")
"""


def test_it_fits_the_installed_vllm() -> None:
    tree = installed_tree()
    verdict = verify(maybe_override_with_speculators, SymbolIndex(tree), tree.version)
    assert verdict.outcome is Outcome.FITS, verdict.detail


def test_it_takes_its_targets_place_and_gives_it_back() -> None:
    """In a process of its own: this one may have applied it already."""
    done = programs.run(programs.command(APPLIED))
    assert done.stdout.strip().endswith("applied and undone"), done.stderr
