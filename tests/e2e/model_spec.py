"""Describes a tiny model: a transformers configuration, random weights, and the one feature that the model tests.

`build_without` makes the same model without that feature. Its outputs must differ from those of the model; otherwise a
comparison with transformers would pass even if Backplane ignored the feature.
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
"""Configuration values that most of the tiny models share."""


def nothing(_model: Any) -> None:
    """Leaves the model as it is."""


@dataclass(frozen=True)
class Architecture:
    """Describes a tiny model of one architecture, with one feature that it tests."""

    config: str
    """Class of the configuration in transformers."""
    model: str
    """Class of the model in transformers."""
    arguments: dict[str, Any]
    adjust: Callable[[Any], None] = nothing
    """Function that changes the random weights before they are saved."""
    off: dict[str, Any] = field(default_factory=dict)
    """Configuration values that remove the tested feature."""
    switch_off: Callable[[Any], None] = nothing
    """Function that removes the tested feature from the weights, where no configuration value does."""

    seed: int = 0
    """A seed with which no output token is near a tie."""

    def build(self, **changes: Any) -> Any:
        """Returns the transformers model with random weights; `changes` override configuration values."""
        import transformers

        config = getattr(transformers, self.config)(**{**self.arguments, **changes})
        config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # `randomize` adds noise to vectors, some of which transformers draws itself
            model = getattr(transformers, self.model)(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("router.bias"):
                    parameter.zero_()  # transformers does not initialize it, so no seed would make it reproducible
        randomize(model, seed=self.seed)
        with torch.no_grad():
            self.adjust(model)
        return model

    def build_without(self) -> Any:
        """Returns the model without the feature that it tests."""
        model = self.build(**self.off)
        with torch.no_grad():
            self.switch_off(model)
        return model

    def save(self, folder: Path) -> Any:
        """Saves the model as a checkpoint in `folder`, and returns it."""
        model = self.build()
        model.save_pretrained(folder)
        return model


def scale(part: str, factor: float) -> Callable[[Any], None]:
    """Returns a function that multiplies all parameters with `part` in their names."""

    def apply(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(factor)

    return apply


def fill(part: str, value: float) -> Callable[[Any], None]:
    """Returns a function that sets all parameters with `part` in their names to `value`."""

    def apply(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.fill_(value)

    return apply
