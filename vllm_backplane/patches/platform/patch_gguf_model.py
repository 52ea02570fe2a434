"""Lets vLLM load a model from the path of a GGUF file, by replacing the path before vLLM reads the configuration."""

from __future__ import annotations

from typing import Any

from vllm_backplane.gguf.hub import refuse_repository
from vllm_backplane.gguf.model_files import is_model
from vllm_patchbay.patch import Patch, Process

_UNTIL_0_30 = "0258d835e74742bd eb26 49d0 b712 9e4c 4afa 4899 5933 8b1b b8e3 06e3 eff2 dd83 15db e2c3 0a81 3c1c"
_SINCE_0_31 = "b111ccf44caca4a9 eb26 49d0 5346 9e4c 4afa 4899 5933 8b1b b8e3 06e3 eff2 dd83 15db e2c3 0a81 3c1c"
_SINCE_0_33 = (
    "8e6f0a39c5920010 eb26 4afc 4899 49d0 5346 9e4c 4afa 4899 5933 8b1b b8e3 06e3 eff2 dd83 15db e2c3 3cda"
    " f416 9e75 8761 74c1 0dc8 2de3 37f5 4d23 9e75 0a81 3c1c"
)


@Patch(
    target="vllm.transformers_utils.config:maybe_override_with_speculators",
    process=Process.PLATFORM,
    versions=">=0.30,<0.34",
    why="vLLM reads the configuration of a model first, and has no hook before that in which a plugin could recognize "
    "the path of a GGUF file and provide its configuration.",
    how="Replaces the path of a GGUF file by a folder that describes it, and refuses the name of a repository that has "
    "only GGUF files. Any other model passes through unchanged.",
    upstream="https://github.com/vllm-project/vllm/issues/39583",
    remove_when="vLLM passes models that it cannot read itself to a registered config parser.",
    faulty_while=(
        "vllm.transformers_utils.config:get_config",
        "Could not detect config format for no config file found",
    ),
    fingerprints={"0.30.0": _UNTIL_0_30, "0.31.0": _SINCE_0_31, "0.32.0": _SINCE_0_31, "0.33.0": _SINCE_0_33},
)
def maybe_override_with_speculators(model: str, *args: Any, **options: Any) -> Any:
    refuse_repository(model, options.get("revision"), options.get("hf_token"))
    if is_model(model):
        # Imported late: few models are GGUF files, and these modules take time to import.
        from vllm_backplane.gguf.config_folder import config_folder
        from vllm_backplane.quantization.gguf import registration

        registration.register()
        model = str(config_folder(model))
    return maybe_override_with_speculators.original(model, *args, **options)
