"""What a tiny model of some architecture is: a configuration of transformers, weights, and something it is here for.

`off` is the same model without that thing. Its answers must differ, or the comparison would not notice if
Backplane left it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import randomize

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def nothing(_model: Any) -> None:
    """Leaves the model as it is."""


@dataclass(frozen=True)
class Architecture:
    config: str
    model: str
    arguments: dict[str, Any]
    adjust: Callable[[Any], None] = nothing
    """Applied to the random weights before they are saved."""
    off: dict[str, Any] = field(default_factory=dict)
    """Configuration of the model without what it stands for."""
    switch_off: Callable[[Any], None] = nothing
    """The same, where it is weights that carry it."""

    seed: int = 0
    """One with which no answer comes near a tie."""

    def build(self, **changes: Any) -> Any:
        import transformers

        config = getattr(transformers, self.config)(**{**self.arguments, **changes})
        config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # vectors vary around what transformers makes them, which is random for some
            model = getattr(transformers, self.model)(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("router.bias"):
                    parameter.zero_()  # transformers leaves it uninitialised, and then no seed helps
        randomize(model, seed=self.seed)
        with torch.no_grad():
            self.adjust(model)
        return model

    def build_without(self) -> Any:
        model = self.build(**self.off)
        with torch.no_grad():
            self.switch_off(model)
        return model

    def save(self, folder: Path) -> Any:
        model = self.build()
        model.save_pretrained(folder)
        return model


def scale(part: str, factor: float) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(factor)

    return apply


def fill(part: str, value: float) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.fill_(value)

    return apply
