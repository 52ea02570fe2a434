"""Tests the patch _set_default_chunked_prefill_and_prefix_caching_args without an engine.

tests/unit/settings/test_explicit_arguments.py shows its purpose.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import AttentionConfig, HiSparseConfig, VllmConfig

from vllm_backplane.patches.platform.patch_arg_utils import (
    _set_default_chunked_prefill_and_prefix_caching_args as patch,
)
from vllm_backplane.settings.explicit_arguments import take_recorded
from vllm_patchbay.patch import Outcome, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version


def test_it_fits_the_installed_vllm() -> None:
    tree = installed_tree()
    verdict = verify(patch, SymbolIndex(tree), tree.version)
    assert verdict.outcome is Outcome.FITS, verdict.detail


def test_it_records_before_the_original_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = SimpleNamespace(async_scheduling=True, enable_prefix_caching=None, attention_config=None)

    def fill_in(arguments: Any, model: str) -> None:
        assert model == "the model's configuration"
        arguments.enable_prefix_caching = True

    monkeypatch.setattr(patch, "original", fill_in)
    patch.replacement(given, "the model's configuration")
    assert given.enable_prefix_caching is True
    assert take_recorded() == {"async_scheduling": True}


@pytest.mark.skipif(
    installed_version().release < (0, 33), reason="before vLLM 0.33, the hook of the platform comes first"
)
def test_vllm_alone_refuses_hisparse_with_advice_about_a_variable_that_no_user_has_set() -> None:
    """Shows the reason for the refusal. If this fails, vLLM calls the platform earlier, and its hook suffices."""
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0", "set by the platform"
    with pytest.raises(ValidationError, match="remove VLLM_USE_V2_MODEL_RUNNER=0"):
        VllmConfig(attention_config=AttentionConfig(hisparse_config=HiSparseConfig()))


def test_vllm_alone_does_not_distinguish_explicit_arguments() -> None:
    """Shows the reason for the patch. If this fails, vLLM has changed and the patch may no longer be needed."""
    from vllm.engine.arg_utils import EngineArgs

    original = patch.original or EngineArgs._set_default_chunked_prefill_and_prefix_caching_args
    model: Any = SimpleNamespace(
        is_chunked_prefill_supported=True, is_prefix_caching_supported=True, runner_type="generate"
    )
    explicit = SimpleNamespace(enable_prefix_caching=True, enable_chunked_prefill=None)
    default = SimpleNamespace(enable_prefix_caching=None, enable_chunked_prefill=None)
    for arguments in (explicit, default):
        original(arguments, model)
    assert explicit == default
