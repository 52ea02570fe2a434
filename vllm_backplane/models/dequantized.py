"""Converts a GGUF file into a Hugging Face folder with float32 weights, which vLLM serves like any other checkpoint.

float32 loses nothing: every value of a 4-bit or 8-bit block is a float32 product and sum. A greedy comparison with
another engine therefore starts from equal weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.errors import BackplaneError

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = {"transformers": "transformers", "gguf": "gguf", "accelerate": "vllm-backplane[fp32-model]"}
"""Modules that `write_folder` needs, with their pip requirements.

transformers reads GGUF files only with accelerate, which nothing else of Backplane needs: it is an extra.
"""

DIGIT_SPLITTING = frozenset({"smollm"})
"""Values of tokenizer.ggml.pre whose pre-tokenizer separates digits before the byte-level split."""


def write_folder(file: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes weights, configuration, tokenizer and chat template of `file` into `folder`."""
    progress("loading transformers")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    progress("expanding the quantized weights to float32 (about 20 seconds)")
    # By default transformers may keep weights quantized where it finds a kernel for them.
    dequantize: dict[str, Any] = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **dequantize
    )
    quantized = [name for name, weight in model.named_parameters() if weight.dtype != torch.float32]
    if quantized:
        raise BackplaneError(
            f"transformers {transformers.__version__} left {len(quantized)} weights of {file.name} quantized "
            f"(the first is {quantized[0]}); uninstall the package 'kernels' or update transformers"
        )
    # The weights are float32 now. With a quantizer set, save_pretrained raises, and a quantization_config in
    # config.json would make readers expect quantized weights.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    for saved in folder.glob("*.safetensors"):
        saved.chmod(0o644)  # safetensors creates files that only the owner can read; a cache may be shared
    progress("saving the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if _metadata_text(file, "tokenizer.ggml.pre") in DIGIT_SPLITTING:
        _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    if not tokenizer.chat_template:
        raise BackplaneError(f"{file.name} has no chat template, so it cannot serve chat requests")


def _metadata_text(file: Path, key: str) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get(key)
    return "" if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    """Makes the tokenizer separate digits.

    transformers gives every GPT-2 style vocabulary only the byte-level split, which joins digits with each other and
    with the space before them. The model was trained with single digits.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
