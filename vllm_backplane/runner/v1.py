"""vLLM's first model runner on a Backplane device. It serves wherever Triton is absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_backplane import ops
from vllm_backplane.config import graphs
from vllm_backplane.device import Device
from vllm_backplane.layers.mamba import refuse_foreign
from vllm_backplane.ops import resolution
from vllm_backplane.runner.decode_graphs import StepGraphs, unrecordable
from vllm_backplane.runner.decode_inputs import DecodeInputs
from vllm_backplane.runner.grammar import masks_on
from vllm_backplane.runner.sampler import replace_sampler


class BackplaneModelRunnerV1(GPUModelRunner):
    max_num_tokens: int
    model: Any
    decode_inputs: DecodeInputs | None = None
    decode_metadata: Any = None
    is_prepared_decode = False
    """Of the step that is being prepared: `decode_inputs` wrote its inputs."""

    def __init__(self, vllm_config: VllmConfig, torch_device: torch.device, device: Device) -> None:
        self.accelerator = device
        super().__init__(vllm_config, torch_device)
        replace_sampler(self)

    def profile_step(self, tokens: int) -> None:
        """Run upstream's profiling step with fewer tokens than the largest step has."""
        largest, self.max_num_tokens = self.max_num_tokens, tokens
        try:
            self.profile_run()
        finally:
            self.max_num_tokens = largest
            self.intermediate_tensors = None  # between pipeline stages; was made for `tokens`, warm_up makes it anew

    def forward_step(self, tokens: int) -> None:
        """The forward pass alone, as profiling runs it."""
        self._dummy_run(tokens, is_profile=True)
        self._sync_device()

    def warm_up(self) -> None:
        """One token through everything; then graphs, where they are wanted and not captured while serving."""
        self._dummy_run(1, skip_eplb=True)
        _compile_ngrams(self)
        if (
            self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
            and not self.accelerator.capabilities.capture_computes
        ):
            self.capture_model()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        refuse_foreign(self.compilation_config.static_forward_context.values())
        if type(self.model) is CUDAGraphWrapper:
            config, device, model = self.vllm_config, self.accelerator, self.model.unwrap()
            missing = [] if device.capabilities.capture_computes else unrecordable(model, resolution.frozen() or ())
            replayed = graphs.settle_graphs(config, device, missing)
            self.model = StepGraphs(model, config, device, self.device.index or 0) if replayed else model
        self.decode_inputs = DecodeInputs.of(self)
        if self.decode_inputs is not None:
            # Not above: it imports every attention backend, and another vLLM may lack what one of them needs.
            from vllm_backplane.runner.decode_metadata import DecodeMetadata

            self.decode_metadata = DecodeMetadata(self)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = self.decode_inputs.prepare(num_scheduled_tokens) if self.decode_inputs is not None else None
        self.is_prepared_decode = prepared is not None
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens) if prepared is None else prepared

    def _determine_batch_execution_and_padding(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._determine_batch_execution_and_padding, *args, **sizes)
        return self.decode_metadata.mode(make, sizes) if self.is_prepared_decode else make()

    def _get_slot_mappings(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._get_slot_mappings, *args, **sizes)
        return self.decode_metadata.slots(make, sizes) if self.is_prepared_decode else make()

    def _build_attention_metadata(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._build_attention_metadata, *args, **sizes)
        # The last that is asked before the step; what runs next may be none.
        is_prepared, self.is_prepared_decode = self.is_prepared_decode, False
        return self.decode_metadata.attention(make, sizes) if is_prepared else make()

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if grammar_output is not None and state is not None and not state.logits.is_cpu:
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            masks = masks_on(state.logits.device, grammar_output, self.input_batch.req_ids, drafts)
            ops.allowed_tokens_mask.call(state.logits, masks)
            grammar_output = None  # upstream has no other use for it
        return super().sample_tokens(grammar_output)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        with self._unfinished_prompts_draw_nothing():
            return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._unfinished_prompts_draw_nothing():
            return super()._bookkeeping_sync(*args, **kwargs)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        """Upstream waits for a copy to the host, where this may be already."""
        return sampled_token_ids.tolist() if sampled_token_ids.is_cpu else super()._to_list(sampled_token_ids)

    @contextmanager
    def _unfinished_prompts_draw_nothing(self) -> Iterator[None]:
        """A request whose prompt is not all in yet has its token thrown away. Upstream draws it all the same and sets
        the request's generator back by an offset, which is how CUDA's generators count and others do not. Here the
        generator is not there to be drawn from, so a seed gives the same tokens however the prompt was cut."""
        generators = self.input_batch.generators
        if not generators:
            yield
            return
        thrown_away = numpy.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        resting = {row: generators.pop(row) for row in thrown_away if row in generators}
        try:
            yield
        finally:
            generators.update(resting)

    def _sync_device(self) -> None:
        self.accelerator.synchronize()

    def _init_kv_zero_meta(self) -> None:
        """Upstream prepares raw addresses for a Triton kernel; `_zero_block_ids` needs none."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for cache in self._caches_to_zero():
            ops.kv_cache_zero_blocks.call(cache, ids)

    def _caches_to_zero(self) -> list[torch.Tensor]:
        """Each attention layer's cache, once, although layers may share one."""
        found: dict[int, torch.Tensor] = {}
        for group in self._kv_cache_spec_attn_group_iterator():
            for name in group.layer_names:
                if name in self.runner_only_attn_layers:
                    continue
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if isinstance(cache, torch.Tensor):
                    found.setdefault(cache.data_ptr(), cache)
        return list(found.values())


def _compile_ngrams(runner: BackplaneModelRunnerV1) -> None:
    """numba compiles the lookup of n-grams when it is first called. vLLM means to do that at start, but has nothing
    looked up then, so nothing is compiled, and the first answer would wait for it."""
    drafting = runner.speculative_config
    if drafting is None or drafting.method != "ngram" or not hasattr(runner, "drafter"):
        return
    batch, nothing_yet = runner.input_batch, [[0]]
    runner.drafter.propose(drafting.num_speculative_tokens, nothing_yet, batch.num_tokens_no_spec, batch.token_ids_cpu)
