"""A GGUF file as a Hugging Face folder that vLLM serves like any other.

Weights are stored in float32: every value of a 4-bit or 8-bit block is a float32 product and sum, so the
folder holds what the file means, and a greedy comparison with another engine starts from equal weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.errors import BackplaneError

if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("transformers", "gguf", "accelerate")
"""What `to_folder` imports, itself or through transformers."""

DIGIT_SPLITTING = frozenset({"smollm"})
"""Values of tokenizer.ggml.pre that separate digits before the byte-level split."""


def to_folder(file: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write weights, configuration, tokenizer and chat template of `file` into `folder`."""
    progress("loading transformers")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    progress("expanding the quantised weights to float32 (about 20 seconds)")
    # transformers may otherwise keep the weights packed where it finds a kernel for that.
    packing: dict[str, Any] = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **packing
    )
    packed = [name for name, weight in model.named_parameters() if weight.dtype != torch.float32]
    if packed:
        raise BackplaneError(
            f"transformers {transformers.__version__} left {len(packed)} weights of {file.name} packed "
            f"({packed[0]} first); uninstall the package 'kernels' or update transformers"
        )
    # The weights are plain now, but the mark of their origin makes save_pretrained refuse, and would make
    # a reader of config.json look for packed ones.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    for saved in folder.glob("*.safetensors"):
        saved.chmod(0o644)  # safetensors creates files for their owner only; a cache may be shared
    progress("saving the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if _metadata_text(file, "tokenizer.ggml.pre") in DIGIT_SPLITTING:
        _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    if not tokenizer.chat_template:
        raise BackplaneError(f"{file.name} carries no chat template, so it cannot answer chat requests")


def _metadata_text(file: Path, key: str) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get(key)
    return "" if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    """transformers gives every GPT-2 style vocabulary the byte-level split alone, which glues digits to
    spaces before them; the model was trained with each digit on its own."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
