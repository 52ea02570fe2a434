"""Implements vLLM's sampler with operators: argmax, penalties, top-k and top-p, min-p, and the random draw.

The steps, their order and every use of a random generator are upstream's, so a request with a seed gets the same tokens
as from vLLM's own PyTorch path. Min-p is not part of the sampler: it is one of the logits processors that the runner
builds, so its object is replaced in the runner's list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config.model import LogprobsMode
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import _convert_to_tensors as padded_tokens
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_backplane import ops
from vllm_backplane.errors import BindingError
from vllm_backplane.guards import guarded


class BackplaneTopKTopPSampler(TopKTopPSampler):
    @guarded(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.__init__",
        why="it sets the same attributes and chooses no sampler of a platform",
    )
    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        # The parent's constructor is not called: it chooses among the samplers of other platforms and prepares their
        # kernels.
        nn.Module.__init__(self)
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel

    @guarded(
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native",
        "vllm.v1.sample.ops.topk_topp_sampler:random_sample",
        why="operators mask and draw, in the same order and with the same use of generators",
    )
    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the tokens, and the processed logits or log-probabilities if the mode includes them. Changes
        `logits` in place."""
        ops.top_k_top_p_mask.call(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        noise = torch.empty_like(probs, dtype=torch.float64 if self.use_fp64_gumbel else torch.float32)
        # The shared generator advances only when a request without a seed needs it.
        if len(generators) != probs.shape[0]:
            noise.exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        return ops.sample_by_race.call(probs, noise), processed


class BackplaneSampler(Sampler):
    """Draws the next tokens from the logits of a step, with Backplane's operators in the place of vLLM's."""

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__(logprobs_mode, use_fp64_gumbel)
        self.topk_topp_sampler = BackplaneTopKTopPSampler(logprobs_mode, use_fp64_gumbel)

    @guarded(
        "vllm.v1.sample.sampler:Sampler.greedy_sample",
        why="an operator finds the largest logit",
    )
    @staticmethod
    def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
        return ops.greedy_argmax.call(logits)

    @guarded(
        "vllm.v1.sample.sampler:Sampler.apply_penalties",
        "vllm.v1.sample.ops.penalties:apply_all_penalties",
        "vllm.v1.sample.ops.penalties:_convert_to_tensors",
        why="an operator applies the penalties",
    )
    @staticmethod
    def apply_penalties(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        if sampling_metadata.no_penalties:
            return logits
        ops.apply_penalties.call(
            logits,
            sampling_metadata.prompt_token_ids,
            padded_tokens(output_token_ids, logits.shape[-1], logits.device),
            sampling_metadata.presence_penalties,
            sampling_metadata.frequency_penalties,
            sampling_metadata.repetition_penalties,
        )
        return logits


class BackplaneMinPLogitsProcessor(MinPLogitsProcessor):
    @guarded(
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.apply",
        why="an operator masks tokens below the limit",
    )
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.min_p_count:
            ops.min_p_mask.call(logits, self.min_p)
        return logits


@guarded(
    "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
    why="it draws with the sampler that is put in the place of the runner's",
    feature="speculation",
)
def replace_sampler(runner: Any) -> None:
    """Replaces the sampler and the min-p processor of a GPUModelRunner that has not served a request yet.

    A second call does nothing.
    """
    present = runner.sampler
    if isinstance(present, BackplaneSampler):
        return
    if type(present) is not Sampler:
        raise BindingError(
            f"the runner's sampler is {type(present).__module__}.{type(present).__qualname__}, which Backplane cannot "
            "replace; remove the option that selects it"
        )
    runner.sampler = BackplaneSampler(present.logprobs_mode, present.use_fp64_gumbel)
    rejection = getattr(runner, "rejection_sampler", None)
    if rejection is not None:
        # It draws the bonus token with the runner's sampler.
        rejection.sampler = runner.sampler
    _replace_min_p(runner)


@guarded(
    "vllm.v1.sample.logits_processor.state:LogitsProcessors",
    why="a processor in its list is replaced",
)
def _replace_min_p(runner: Any) -> None:
    # The runner passes this very list on when it rebuilds its batch for the final cache geometry.
    processors = runner.input_batch.logitsprocs.argmax_invariant
    for place, processor in enumerate(processors):
        if type(processor) is MinPLogitsProcessor:
            if processor.min_p_count:
                raise BindingError("min-p is already in use; replace the sampler before the first request")
            pinned = processor.min_p_cpu_tensor.is_pinned()
            processors[place] = BackplaneMinPLogitsProcessor(runner.vllm_config, runner.device, pinned)
