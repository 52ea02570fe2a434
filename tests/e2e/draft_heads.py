"""Makes tiny target models with a draft model, an EAGLE-3 head and an MTP head, and counts accepted draft tokens.

The heads are built here from modules of transformers, so the expected draft tokens do not depend on vLLM's
implementation. `accepted_per_step` follows a greedy output as speculative decoding does, and returns how many draft
tokens the target accepts in each step. It computes every forward pass from the beginning, without a KV cache, so an
engine that reads a stale slot gives other draft tokens.

The vocabulary is small, and the heads start as copies of layers of their target. Random heads would be accepted so
rarely that the counts would show nothing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from model_spec import COMMON
from tiny_models import randomize
from torch import nn

SIZES = {**COMMON, "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96}


def _attend(attention: Any, hidden: torch.Tensor, rotary: Any) -> torch.Tensor:
    """Computes causal attention over one sequence [tokens, width]."""
    length = hidden.shape[0]
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = attention(
        hidden.unsqueeze(0), position_embeddings=rotary(hidden.unsqueeze(0), positions), attention_mask=mask
    )
    return out[0][0]


class Eagle3Head(nn.Module):
    """Runs one layer on the embedding of the next token, concatenated with combined hidden states of the target.

    The hidden states are the inputs of three layers of the target.
    """

    LAYERS = (1, 2, 3)
    """The layers of the target whose inputs are used."""

    def __init__(self, target: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        config, last = target.config, target.model.layers[-1]
        width = config.hidden_size
        self.midlayer = copy.deepcopy(last)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(last.self_attn, name)
            wide = nn.Linear(2 * width, old.out_features, bias=False)
            wide.weight = nn.Parameter(torch.cat([old.weight, old.weight.flip(0)], dim=1) / 2**0.5)
            setattr(self.midlayer.self_attn, name, wide)
        self.midlayer.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = copy.deepcopy(target.model.norm)
        self.lm_head = copy.deepcopy(target.lm_head)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.eye(width) * part for part in (0.2, 0.3, 0.5)], dim=1))

    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combines hidden states of the target, given by layer, into one."""
        return self.fc(torch.cat([states[layer] for layer in self.LAYERS], dim=-1))

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states for the logits, and those for the next draft token."""
        layer = self.midlayer
        seen = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        hidden = hidden + _attend(layer.self_attn, seen, rotary)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden), hidden


class MtpHead(nn.Module):
    """Computes MiMo's head: one layer on the next token's embedding and the target's last hidden state, projected."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        width, norm = target.config.hidden_size, target.model.norm
        layer = copy.deepcopy(target.model.layers[-1])
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.token_layernorm, self.hidden_layernorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.final_layernorm = copy.deepcopy(norm)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            self.input_proj.weight.copy_(torch.cat([torch.eye(width) * 0.7, torch.eye(width)], dim=1))

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states for the logits, and those for the next draft token; here they are the same."""
        embeds = embeds.clone()
        embeds[0] = 0  # MiMo ignores the first token
        joined = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        hidden = self.input_proj(joined)
        hidden = hidden + _attend(self.self_attn, self.input_layernorm(hidden), rotary)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        hidden = self.final_layernorm(hidden)
        return hidden, hidden


def _target(kind: str, layers: int, seed: int) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_hidden_layers": layers})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    randomize(model, seed=seed)
    return model


def save_llama_with_eagle3(folder: Path, *, layers: int = 4, seed: int = 0) -> tuple[Any, Eagle3Head]:
    """Saves a target in folder/target and its EAGLE-3 head in folder/head, and returns both."""
    from safetensors.torch import save_file

    model = _target("Llama", layers, seed)
    head = Eagle3Head(model)
    model.save_pretrained(folder / "target")
    model.config.save_pretrained(folder / "head")
    described = json.loads((folder / "head" / "config.json").read_text())
    described |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": SIZES["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(Eagle3Head.LAYERS)},
    }
    (folder / "head" / "config.json").write_text(json.dumps(described))
    save_file(
        {name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "head/model.safetensors"
    )
    return model, head


def save_shallow(target: Any, folder: Path, *, layers: int = 3) -> Any:
    """Saves and returns a draft model: the first layers of the target, with its vocabulary."""
    model = copy.deepcopy(target)
    model.config.num_hidden_layers = layers
    model.model.layers = model.model.layers[:layers]
    model.save_pretrained(folder)
    return model


def save_mimo(folder: Path, *, layers: int = 2, seed: int = 0) -> tuple[Any, MtpHead]:
    """Saves a target whose checkpoint contains its MTP head, and returns both.

    MiMo is Qwen2 with a head, so the configuration is that of Qwen2.
    """
    from safetensors.torch import load_file, save_file

    model = _target("Qwen2", layers, seed)
    head = MtpHead(model)
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.mtp_layers.0.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return model, head


@torch.inference_mode()
def accepted_per_step(
    model: Any, head: Any, prompt: Sequence[int], output: Sequence[int], *, max_tokens: int, drafts: int
) -> list[int]:
    """Returns how many draft tokens the target accepts in each step, until there are `max_tokens` output tokens.

    `output` is the greedy output of the target. It must be longer than `max_tokens`, because vLLM also counts draft
    tokens beyond the end.
    """
    tokens = [*prompt, *output]
    draft = _drafter(model, head, tokens)
    known, accepted = len(prompt) + 1, []  # the prefill gives the first token
    while known < len(prompt) + max_tokens:
        drafted = draft(tokens[:known], drafts)
        matching = 0
        while matching < drafts and drafted[matching] == tokens[known + matching]:
            matching += 1
        accepted.append(matching)
        known += matching + 1
    return accepted


def _drafter(model: Any, head: Any, tokens: Sequence[int]) -> Callable[[Sequence[int], int], list[int]]:
    """Returns a function of known tokens and a count, which returns that many draft tokens after the known ones.

    `tokens` is the whole sequence, from which the hidden states of the target are computed once. A draft model does not
    need them.
    """
    if isinstance(head, Eagle3Head):
        output = model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
        from_target, unembed = head.combine([state[0] for state in output.hidden_states]), head.lm_head
    elif isinstance(head, MtpHead):
        # The last hidden state of transformers is that after the final norm; MiMo's head takes the one before it.
        from_target, unembed = _before_norm(model, tokens), model.lm_head
    else:
        return lambda known, count: _continued(head, known, count)
    return lambda known, count: _drafts(model, head, unembed, from_target, known, count)


def _continued(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(int(model(input_ids=torch.tensor([[*tokens, *found]])).logits[0, -1].argmax()))
    return found


def _before_norm(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    held: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, given: held.append(given[0][0]))
    model(input_ids=torch.tensor([list(tokens)]))
    hook.remove()
    return held[0]


def _drafts(
    model: Any, head: Any, unembed: Any, from_target: torch.Tensor, tokens: Sequence[int], count: int
) -> list[int]:
    """Returns `count` draft tokens after `tokens`.

    The target has computed no hidden state for the last of `tokens` yet. For the draft tokens, the head continues with
    its own hidden states.
    """
    hidden = from_target[: len(tokens) - 1]
    fed = list(tokens[1:])
    found: list[int] = []
    for _ in range(count):
        embeds = model.model.embed_tokens(torch.tensor(fed))
        for_logits, handed_on = head(embeds, hidden, model.model.rotary_emb)
        found.append(int(unembed(for_logits[-1]).argmax()))
        fed.append(found[-1])
        hidden = torch.cat([hidden, handed_on[-1:]])
    return found
