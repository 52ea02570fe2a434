"""Tests the patch maybe_override_with_speculators without an engine."""

from __future__ import annotations

import pytest

from tests import programs
from vllm_backplane.patches.platform.patch_gguf_model import maybe_override_with_speculators
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree

APPLY_AND_UNDO = """
from vllm_backplane.patches import application
from vllm_backplane.patches.platform.patch_gguf_model import maybe_override_with_speculators
from vllm_patchbay.patch import PatchSession, PatchSet
from vllm_patchbay.patch.rebinding import find_target

find_target(maybe_override_with_speculators)  # this import may choose the platform, which applies the patch
application.session().undo()
session = PatchSession.for_installed_vllm()
owner, attribute, before = find_target(maybe_override_with_speculators)
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


@pytest.mark.process
def test_it_replaces_its_target_and_restores_it() -> None:
    """Runs in a new process, because this one may have applied the patch already."""
    done = programs.run(programs.command(APPLY_AND_UNDO))
    assert done.stdout.strip().endswith("applied and undone"), done.stderr
