"""Adds a model architecture to vLLM from a separate package."""

ARCHITECTURE = "ParallelDecoderForCausalLM"


def register() -> None:
    """Registers the model. vLLM calls this entry point (``vllm.general_plugins``) in every process, possibly twice."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from parallel_decoder.configuration import ParallelDecoderConfig

    # vLLM reads config.json through transformers.
    AutoConfig.register(ParallelDecoderConfig.model_type, ParallelDecoderConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # A string instead of the class: only processes that load the model import its module.
        ModelRegistry.register_model(ARCHITECTURE, f"parallel_decoder.model:{ARCHITECTURE}")
