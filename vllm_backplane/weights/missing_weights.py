"""Weights of a model that the checkpoint does not have.

vLLM compares what was loaded with what there is, of quantized checkpoints where it is asked to. Here it is asked to, so
that a missing norm, embedding or head is an error wherever a model says what it loads; layers that are packed while
they are loaded insist on their parts themselves (`layers/deferred_weights.py`). vLLM's error does not say what to do
about it; ours does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_backplane.errors import CheckpointError
from vllm_backplane.weights.load_formats import SHARED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "enable_weights_track"
"""Of vLLM's loader of checkpoints, in --model-loader-extra-config."""
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", SHARED)
"""Load formats that this loader has. Others refuse the option."""
NAMED = 4
_TOLD = "Following weights were not initialized from checkpoint"


def track_loaded_weights(config: VllmConfig) -> None:
    """A user who says something about it is believed."""
    from vllm_backplane.quantization.checkpoint.registration import NAMES
    from vllm_backplane.quantization.online.formats import ONLINE

    model, loading, drafting = config.model_config, config.load_config, config.speculative_config
    if model is None or model.quantization not in (*NAMES, *ONLINE) or loading.load_format not in FORMATS:
        return
    if model.convert_type == "classify":
        return  # vLLM does not count the bias of the head that it adds.
    drafts = drafting.draft_model_config if drafting is not None else None
    if drafts is not None and drafts is not drafting.target_model_config and drafts.quantization is not None:
        return  # It is loaded with the same options, and may take its embedding and its head from the model.
    if isinstance(loading.model_loader_extra_config, dict):
        loading.model_loader_extra_config = {OPTION: True, **loading.model_loader_extra_config}


@contextmanager
def remedy_named() -> Iterator[None]:
    """Of an error in which vLLM lists what was not loaded."""
    try:
        yield
    except ValueError as fault:
        if not str(fault).startswith(_TOLD):
            raise
        missing = sorted(re.findall(r"'([^']+)'", str(fault)))
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise CheckpointError(
            f"the checkpoint has no weights for {', '.join(missing[:NAMED])}{more}; choose a complete one, or, where "
            f"this model is known to do without them, add --model-loader-extra-config '{{\"{OPTION}\": false}}'"
        ) from fault
