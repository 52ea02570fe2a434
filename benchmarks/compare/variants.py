"""Lists the compared variants: every engine in every weight format. A new format of ours is one line here.

Formats of different engines are comparable if their bits are equal. llama.cpp, like Backplane, keeps activations in
float32 and quantizes them to 8 bits before a matrix product with 8- or 4-bit weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS, VLLM_CPU, LLAMA_CPP = "ours", "vllm-cpu", "llama.cpp"
ENGINES = (OURS, VLLM_CPU, LLAMA_CPP)


@dataclass(frozen=True, slots=True)
class Variant:
    """Describes an engine with a weight format."""

    engine: str
    format: str
    bits: int
    """Bits of a weight, without scales."""
    arguments: Mapping[str, str | bool] = field(default_factory=dict)
    """Arguments of `vllm.LLM`, for engines that are vLLM."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gguf: str = ""
    """The type of the matrices in the GGUF file, for variants that load one."""
    default: bool = True
    """Whether it is measured if the command names no variants."""

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.format}"

    def flags(self) -> list[str]:
        """Returns the arguments as command-line options of `vllm serve`."""
        spelt: list[str] = []
        for key, value in self.arguments.items():
            flag = "--" + key.replace("_", "-")
            spelt += [flag] if value is True else [flag, str(value)]
        return spelt


GGUF_FORMATS = {
    "F32": (32, "float32"),
    "BF16": (16, "bfloat16"),
    "F16": (16, "float16"),
    "Q8_0": (8, "float32"),
    "Q6_K": (6, "float32"),
    "Q5_K": (5, "float32"),
    "Q5_1": (5, "float32"),
    "Q5_0": (5, "float32"),
    "Q4_K": (4, "float32"),
    "Q4_1": (4, "float32"),
    "Q4_0": (4, "float32"),
    "IQ4_NL": (4, "float32"),
    "Q3_K": (3, "float32"),
    "Q2_K": (2, "float32"),
}
"""Every served GGUF type, with its bits and the dtype that Backplane computes in."""

VARIANTS = (
    Variant(OURS, "fp32", 32, {"dtype": "float32"}),
    Variant(OURS, "bf16", 16, {"dtype": "bfloat16"}),
    Variant(OURS, "int8", 8, {"dtype": "float32", "quantization": "int8"}),
    Variant(OURS, "int4", 4, {"dtype": "float32", "quantization": "int4"}),
    # These load the same files as llama.cpp.
    *(
        Variant(OURS, f"gguf-{kind.lower()}", bits, {"dtype": dtype}, gguf=kind, default=kind in ("Q8_0", "Q4_0"))
        for kind, (bits, dtype) in GGUF_FORMATS.items()
    ),
    # By default vllm-cpu compiles the model at start.
    Variant(VLLM_CPU, "fp32", 32, {"dtype": "float32"}),
    Variant(VLLM_CPU, "bf16", 16, {"dtype": "bfloat16"}),
    Variant(VLLM_CPU, "fp32-eager", 32, {"dtype": "float32", "enforce_eager": True}, default=False),
    Variant(VLLM_CPU, "bf16-eager", 16, {"dtype": "bfloat16", "enforce_eager": True}, default=False),
    # By default vllm-cpu reserves one core for its scheduler and computes on the others.
    Variant(
        VLLM_CPU,
        "fp32-eager-all-cores",
        32,
        {"dtype": "float32", "enforce_eager": True},
        {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        default=False,
    ),
    *(
        Variant(LLAMA_CPP, kind.lower(), bits, gguf=kind, default=kind in ("F32", "F16", "Q8_0", "Q4_0"))
        for kind, (bits, _) in GGUF_FORMATS.items()
    ),
)


def choose(engines: Sequence[str] = (), names: Sequence[str] = ()) -> list[Variant]:
    """Returns the named variants, or the default variants of the named engines (of all engines if none is named)."""
    unknown = [name for name in names if name not in {variant.name for variant in VARIANTS}]
    unknown += [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; variants: {', '.join(v.name for v in VARIANTS)}")
    if names:
        return [variant for variant in VARIANTS if variant.name in names]
    return [variant for variant in VARIANTS if variant.default and (not engines or variant.engine in engines)]


def choose_formats(formats: Sequence[str] = (), engines: Sequence[str] = ()) -> list[Variant]:
    """Returns the variants that load GGUF files, of the named formats and engines (of all if none is named)."""
    wanted = [name.upper() for name in formats]
    if unknown := [name for name in wanted if name not in GGUF_FORMATS]:
        raise ValueError(f"unknown GGUF format: {', '.join(unknown)}; formats: {', '.join(GGUF_FORMATS)}")
    if cannot := [engine for engine in engines if engine not in (OURS, LLAMA_CPP)]:
        raise ValueError(f"{', '.join(cannot)} cannot load GGUF files; {OURS} and {LLAMA_CPP} can")
    loading = [variant for variant in VARIANTS if variant.gguf and (not engines or variant.engine in engines)]
    return [variant for variant in loading if not wanted or variant.gguf in wanted]


def in_turns(variants: Sequence[Variant]) -> list[Variant]:
    """Sorts variants so that those to be compared are adjacent: a machine that becomes slower slows them all."""
    return sorted(variants, key=lambda variant: (-variant.bits, variant.gguf, ENGINES.index(variant.engine)))


def find(name: str) -> Variant:
    return choose(names=[name])[0]
