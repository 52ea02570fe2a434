"""A path of a GGUF file is a model: vLLM reads the configuration before any plugin could say where it is."""

from __future__ import annotations

from typing import Any

from vllm_backplane.gguf.hub import refuse_repository
from vllm_backplane.gguf.model_files import is_model
from vllm_patchbay.patch import Patch, Process

_UNTIL_0_30 = "0258d835e74742bd eb26 49d0 b712 9e4c 4afa 4899 5933 8b1b b8e3 06e3 eff2 dd83 15db e2c3 0a81 3c1c"
_SINCE_0_31 = "b111ccf44caca4a9 eb26 49d0 5346 9e4c 4afa 4899 5933 8b1b b8e3 06e3 eff2 dd83 15db e2c3 0a81 3c1c"


@Patch(
    target="vllm.transformers_utils.config:maybe_override_with_speculators",
    process=Process.PLATFORM,
    versions=">=0.30,<0.33",
    why="vLLM reads the configuration of a model as its first act, and has no hook before it by which a plugin could "
    "say that a path is a GGUF file and where its configuration is.",
    how="Puts the folder that describes a GGUF file in the place of its path, and refuses the name of a repository "
    "that has nothing but GGUF files; any other model passes through unchanged.",
    upstream="https://github.com/vllm-project/vllm/issues/39583",
    remove_when="vLLM asks a registered config parser about models that it cannot read itself.",
    fingerprints={"0.30.0": _UNTIL_0_30, "0.31.0": _SINCE_0_31, "0.32.0": _SINCE_0_31},
)
def maybe_override_with_speculators(model: str, *args: Any, **options: Any) -> Any:
    refuse_repository(model, options.get("revision"), options.get("hf_token"))
    if is_model(model):
        # Late: most models are none, and these take time to import.
        from vllm_backplane.gguf.folder import described
        from vllm_backplane.quantization.gguf import config, loader

        config.register()  # raises if another plugin has taken the name since
        loader.register()
        model = str(described(model))
    return maybe_override_with_speculators.original(model, *args, **options)
