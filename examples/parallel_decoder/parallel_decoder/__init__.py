"""An architecture that vLLM does not have, from a package of its own."""

ARCHITECTURE = "ParallelDecoderForCausalLM"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: runs in every vLLM process, may run twice."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from parallel_decoder.configuration import ParallelDecoderConfig

    # vLLM reads config.json through transformers.
    AutoConfig.register(ParallelDecoderConfig.model_type, ParallelDecoderConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # By name: the module is imported where the model is loaded, not in every process.
        ModelRegistry.register_model(ARCHITECTURE, f"parallel_decoder.model:{ARCHITECTURE}")
