"""Reports weights of a model that its quantized checkpoint does not have.

For quantized checkpoints vLLM compares the loaded weights with the model's parameters only if an option enables it.
This module enables it, so that a missing norm, embedding or head is an error for every model that returns the names of
what it loaded. Layers that are packed during loading check their own parts (`layers/layerwise_loading.py`). vLLM's
error names no remedy, so it is replaced by one that does.
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
"""Key of vLLM's default loader in --model-loader-extra-config."""
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", SHARED)
"""Load formats of the default loader. Other loaders refuse the option."""
MAX_NAMES = 4
"""Missing weights that the error names; of the others it gives the number."""
_UPSTREAM_MESSAGE = "Following weights were not initialized from checkpoint"


def track_loaded_weights(config: VllmConfig) -> None:
    """Enables vLLM's comparison for quantized checkpoints, unless the user has set the option."""
    from vllm_backplane.quantization.checkpoint.registration import NAMES
    from vllm_backplane.quantization.online.formats import ONLINE

    model, loading, drafting = config.model_config, config.load_config, config.speculative_config
    if model is None or model.quantization not in (*NAMES, *ONLINE) or loading.load_format not in FORMATS:
        return
    if model.convert_type == "classify":
        return  # vLLM does not record the bias of the head that it adds as loaded.
    draft = drafting.draft_model_config if drafting is not None else None
    if draft is not None and draft is not drafting.target_model_config and draft.quantization is not None:
        return  # The draft model is loaded with the same options, and may share the target's embedding and head.
    if isinstance(loading.model_loader_extra_config, dict):
        loading.model_loader_extra_config = {OPTION: True, **loading.model_loader_extra_config}


@contextmanager
def error_with_remedy() -> Iterator[None]:
    """Replaces vLLM's error about weights that were not loaded by a CheckpointError that names the remedy."""
    try:
        yield
    except ValueError as fault:
        if not str(fault).startswith(_UPSTREAM_MESSAGE):
            raise
        missing = sorted(re.findall(r"'([^']+)'", str(fault)))
        more = f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else ""
        raise CheckpointError(
            f"the checkpoint has no weights for {', '.join(missing[:MAX_NAMES])}{more}; choose a complete one or, if "
            f"this model works without them, add --model-loader-extra-config '{{\"{OPTION}\": false}}'"
        ) from fault
