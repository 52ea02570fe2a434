"""Describes vLLM's model classes that the tests use, in one process, where vLLM has not described them before.

vLLM keeps a description of each model class in its cache. It makes a missing one in a process of its own, which imports
PyTorch and vLLM for one class. `make test` runs this program beside the first tests of a new machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ARCHITECTURES = (
    "BertForSequenceClassification",
    "BertModel",
    "Blip2ForConditionalGeneration",
    "BloomForCausalLM",
    "DeepseekV3ForCausalLM",
    "Eagle3LlamaForCausalLM",
    "GPT2LMHeadModel",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiMoForCausalLM",
    "MiMoMTPModel",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OPTForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "TransformersForCausalLM",
    "WhisperForConditionalGeneration",
)


def main() -> int:
    home = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", f"{home}/vllm")) / "modelinfos"
    if len(list(cache.glob("*.json"))) >= len(ARCHITECTURES):
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM warns of what some of its classes lack
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda describe: describe()
    for name in ARCHITECTURES:
        registry.ModelRegistry.models[name].inspect_model_cls()
    return 0


if __name__ == "__main__":
    sys.exit(main())
