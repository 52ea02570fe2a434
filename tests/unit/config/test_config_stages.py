"""Tests that options which a device cannot fulfil are refused while vLLM is configured, by the name of the option.

Refusals that engine arguments reach on the device `cpu` are in tests/e2e/test_startup_failures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    HiSparseConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.watermarking import WatermarkConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_backplane.attention.implementation import BackplaneAttentionImpl
from vllm_backplane.attention.selection import BACKEND, MLA_BACKEND, backend_path
from vllm_backplane.config import graphs, refusals, stages
from vllm_backplane.device import Device, MemoryInfo, Probe
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.ops.resolution import Resolution
from vllm_backplane.runner.step_graphs import uncapturable
from vllm_backplane.runtime import Runtime, choose, configured
from vllm_backplane.settings.explicit_arguments import record
from vllm_backplane.worker.worker import BackplaneWorker


class Card(Device):
    """Stands in for a device without optional capabilities."""

    name = "card"
    torch_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(available=True, count=2)

    def memory(self, index: int = 0) -> MemoryInfo:
        return MemoryInfo(total=1 << 34, free=1 << 33)


def cards() -> Runtime:
    """Returns the runtime of a process that has started on the device above."""
    chosen = configured({})
    return replace(chosen, device=Card(), selection=replace(chosen.selection, probe=Card.probe()))


def workers(count: int) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=count, distributed_executor_backend="mp"),
    )


@pytest.mark.parametrize("chosen", [cards, lambda: choose(name="sim")], ids=["card", "sim"])
def test_more_workers_than_cards(chosen: Any) -> None:
    chosen = chosen()
    count, name = chosen.selection.probe.count, chosen.device.name
    refusals.refuse_unsupported(workers(count), chosen)
    expected = (
        rf"{count + 1} workers were requested .* device '{name}' has {count} card\(s\); lower --tensor-parallel-size"
    )
    with pytest.raises(BackplaneError, match=expected):
        refusals.refuse_unsupported(workers(count + 1), chosen)


def test_the_hosts_memory_is_one_card_for_any_number_of_workers() -> None:
    refusals.refuse_unsupported(workers(3), configured({}))


@pytest.mark.parametrize(
    "named", [None, ["q_proj", "experts"], ["model.layers.0.experts"], ["experts.0.gate_proj"], ["routed_experts"]]
)
def test_adapters_of_experts(named: Any) -> None:
    config = mixture(named)
    expected = (
        r"experts of MixtralForCausalLM take no LoRA adapters here; .* --lora-target-modules q_proj .*--enable-lora"
    )
    with pytest.raises(BackplaneError, match=expected):
        refusals.refuse_expert_adapters(config)


def test_adapters_beside_experts() -> None:
    refusals.refuse_expert_adapters(mixture(["q_proj", "shared_experts"]))
    dense = mixture(None)
    dense.model_config.is_moe = False
    refusals.refuse_expert_adapters(dense)
    plain = mixture(None)
    plain.lora_config = None
    refusals.refuse_expert_adapters(plain)


def mixture(named: list[str] | None) -> Any:
    return SimpleNamespace(
        lora_config=LoRAConfig(target_modules=named),
        model_config=SimpleNamespace(is_moe=True, architectures=["MixtralForCausalLM"]),
    )


def test_the_v2_model_runner_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(BackplaneError, match="device 'cpu' has no Triton; set VLLM_USE_V2_MODEL_RUNNER=0"):
        VllmConfig()


V2_FEATURES = pytest.mark.parametrize(
    ("given", "arguments", "expected"),
    [
        (
            lambda: {"attention_config": AttentionConfig(hisparse_config=HiSparseConfig())},
            lambda: {"attention_config": {"hisparse_config": {}}},
            "^HiSparse attention .* device 'cpu' has no Triton; remove hisparse_config from --attention-config",
        ),
        (
            lambda: {"watermark_config": WatermarkConfig(key=1)},
            lambda: {"watermark_config": {"key": 1}},
            "^watermarking needs .* device 'cpu' has no Triton; remove --watermark-config",
        ),
    ],
    ids=["HiSparse", "watermarking"],
)
"""Features for which vLLM ignores or refuses VLLM_USE_V2_MODEL_RUNNER=0, so that is no remedy."""
Make = Callable[[], dict[str, Any]]


@V2_FEATURES
@pytest.mark.parametrize("variable", ["0", "1", None])
def test_features_of_the_v2_model_runner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, given: Make, arguments: Make, expected: str
) -> None:
    """Tests a server's or a program's arguments; the platform sets the variable to 0."""
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    choose_runner(monkeypatch, variable)
    made = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64, **arguments())
    with pytest.raises(BackplaneError, match=expected):
        made.create_engine_config()


@V2_FEATURES
def test_features_of_the_v2_model_runner_in_a_configuration_without_arguments(
    monkeypatch: pytest.MonkeyPatch, given: Make, arguments: Make, expected: str
) -> None:
    choose_runner(monkeypatch, None)  # with 0 vLLM refuses HiSparse before it calls the platform
    with pytest.raises(BackplaneError, match=expected):
        VllmConfig(**given())


def choose_runner(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)


def test_graphs_on_a_device_without_them() -> None:
    requested = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    config = VllmConfig(compilation_config=requested)
    with pytest.raises(BackplaneError, match=r"device 'card' does not support graphs; remove -cc\.cudagraph_mode"):
        graphs.set_compilation_defaults(config, cards())


def test_graphs_of_what_no_graph_can_contain() -> None:
    config = VllmConfig(compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY))
    assert graphs.finalize_graphs(config, Card(), [])
    with pytest.raises(BackplaneError, match=r"paged_attention on device 'card' read .*; remove -cc\.cudagraph_mode"):
        graphs.finalize_graphs(config, Card(), ["paged_attention"])
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.parametrize(
    ("implementation", "experts", "expected"),
    [
        ("kernel", [], []),
        ("reference", [], ["paged_attention"]),
        ("kernel", [True], ["moe_experts"]),
        ("kernel", [False], ["quantized experts"]),
    ],
)
def test_what_no_graph_can_contain(implementation: str, experts: list[bool], expected: list[str]) -> None:
    table = [
        Resolution("paged_attention", "attention", implementation, "here", "stated"),
        Resolution("moe_experts", "moe", "reference", "here", "no kernel"),
        Resolution("rms_norm", "norm", "reference", "here", "no kernel"),
    ]
    model = torch.nn.ModuleList(torch.nn.Identity() for _ in experts)
    for module, uses_fused_operator in zip(model, experts, strict=True):
        # Only the type of the method matters here, so its constructor is left out.
        body = {"__init__": torch.nn.Module.__init__, "uses_fused_operator": uses_fused_operator}
        module.quant_method = type("Method", (BackplaneFusedMoEMethod,), body)()
    assert uncapturable(model, table) == expected


def test_a_type_of_the_kv_cache_that_the_device_does_not_list() -> None:
    config = VllmConfig(cache_config=CacheConfig(cache_dtype="fp8"))
    with pytest.raises(
        BackplaneError, match=r"device 'card' cannot store the KV cache as 'fp8'; choose .* among: auto"
    ):
        refusals.refuse_unsupported(config, cards())


def test_a_type_that_the_device_cannot_compute_in() -> None:
    current_platform.check_if_supports_dtype(torch.float32)
    with pytest.raises(BackplaneError, match=r"'cpu' cannot compute in torch\.float64; choose --dtype among: bfloat16"):
        current_platform.check_if_supports_dtype(torch.float64)


def test_a_stateless_group_over_a_backend_that_the_device_does_not_bring() -> None:
    with pytest.raises(BackplaneError, match=r"'cpu' has no stateless process group over 'nccl'; set Device\.coll"):
        current_platform.stateless_init_device_torch_dist_pg("nccl", None, 0, 1, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("stated", "expected"), [(0.3, 0.3), (None, CpuDevice.capabilities.default_memory_share)], ids=["stated", "default"]
)
def test_vllms_own_option_for_memory_is_honoured(stated: float | None, expected: float) -> None:
    cache = CacheConfig() if stated is None else CacheConfig(gpu_memory_utilization=stated)
    assert VllmConfig(cache_config=cache).cache_config.gpu_memory_utilization == expected


def model(quantization: str | None) -> Any:
    return SimpleNamespace(quantization=quantization)


GROUP = {"backplane": {"quantization_group": 64}}


@pytest.mark.parametrize(
    ("of_model", "of_target", "idle"),
    [(None, None, True), ("gguf", None, True), ("int8", None, False), ("int4", None, False), (None, "int8", False)],
)
def test_a_group_size_that_nothing_reads(of_model: str | None, of_target: str | None, idle: bool) -> None:
    """A draft model's configuration has the target's beside it."""
    drafting = SimpleNamespace(target_model_config=model(of_target)) if of_target else None
    config: Any = SimpleNamespace(model_config=model(of_model), speculative_config=drafting)
    refusals.refuse_unused_group_size(config, configured({}))
    if idle:
        with pytest.raises(
            BackplaneError, match=r"quantization_group is 64 .* add --quantization int8 or int4, or rem"
        ):
            refusals.refuse_unused_group_size(config, configured(GROUP))
    else:
        refusals.refuse_unused_group_size(config, configured(GROUP))


# --- layers with states -------------------------------------------------------------------------------------------


def with_states(hybrid: bool, explicit: Any = None, **cache: Any) -> Any:
    """Returns the parts of vLLM's configuration that concern recurrent states. vLLM turns prefix caching on by default
    for hybrid models only."""
    record(SimpleNamespace(async_scheduling=None, enable_prefix_caching=explicit))
    model = SimpleNamespace(
        is_hybrid=hybrid,
        has_inner_state=True,
        is_prefix_caching_supported=hybrid,
        architectures=["SomeForCausalLM"],
        max_model_len=512,
    )
    given = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "mamba_block_size": 16}
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(**given | cache),
        scheduler_config=SimpleNamespace(),
    )


def test_prefix_caching_of_a_hybrid_is_off_unless_requested() -> None:
    config = with_states(hybrid=True)
    stages.set_prefix_caching(config)
    cache = config.cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode, cache.mamba_block_size) == (False, "none", 512)


@pytest.mark.parametrize(
    ("hybrid", "cache", "explicit"),
    [
        (True, {}, True),
        (True, {"mamba_cache_mode": "all"}, None),
        (False, {}, None),  # vLLM's default is off, so the user requested it
    ],
    ids=["stated", "cache mode", "no hybrid"],
)
def test_requested_prefix_caching_is_refused(hybrid: bool, cache: dict[str, Any], explicit: bool | None) -> None:
    with pytest.raises(
        BackplaneError, match=r"SomeForCausalLM carries a recurrent state.* remove --enable-prefix-caching"
    ):
        stages.set_prefix_caching(with_states(hybrid, explicit, **cache))


@pytest.mark.parametrize("hybrid", [True, False])
def test_without_prefixes_states_are_as_vllm_has_them(hybrid: bool) -> None:
    config = with_states(hybrid, enable_prefix_caching=False, mamba_cache_mode="none", mamba_block_size=7)
    stages.set_prefix_caching(config)
    assert config.cache_config.mamba_block_size == 7


# --- experts ------------------------------------------------------------------------------------------------------


def test_balancing_the_load_of_experts_is_refused() -> None:
    """vLLM refuses it for every out-of-tree platform; Backplane refuses it too, in case vLLM stops doing so."""
    with pytest.raises(ValueError, match="load balancing is only supported on CUDA"):
        ParallelConfig(enable_eplb=True, enable_expert_parallel=True, tensor_parallel_size=2)
    config = VllmConfig()
    config.parallel_config.enable_eplb = True
    with pytest.raises(BackplaneError, match="expert load balancing is not supported; remove --enable-eplb"):
        refusals.refuse_unsupported(config, configured({}))


# --- speculation --------------------------------------------------------------------------------------------------


def speculating(method: str, drafts: int, **more: Any) -> Any:
    """Returns the parts of vLLM's configuration that concern graphs."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, num_speculative_tokens=drafts) if method else None,
        model_config=SimpleNamespace(enforce_eager=False, runner_type="generate", is_encoder_decoder=False),
        parallel_config=SimpleNamespace(world_size=1, world_size_across_dp=1),
        scheduler_config=SimpleNamespace(
            max_num_seqs=more.get("sequences", 3), max_num_batched_tokens=more.get("tokens", 4096)
        ),
        compilation_config=CompilationConfig(),
        lora_config=None,
        kv_transfer_config=None,
        use_v2_model_runner=False,
        additional_config={},
    )


def test_ngrams_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    config = VllmConfig()
    config.speculative_config = SimpleNamespace(method="ngram", target_model_config=None)
    monkeypatch.setattr(refusals, "find_spec", lambda name: object())
    refusals.refuse_unsupported(config, configured({}))
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    with pytest.raises(BackplaneError, match="run: pip install numba"):
        refusals.refuse_unsupported(config, configured({}))


@pytest.mark.parametrize(
    ("device", "method", "drafts", "sizes"),
    [
        ("cpu", "", 0, [1, 2, 3]),
        ("cpu", "ngram", 4, [5, 10, 15]),
        ("cpu", "mtp", 30, [31, 62]),
        ("cpu", "eagle3", 63, [64]),
        ("cpu", "ngram", 64, None),  # more tokens than a graph takes
        ("cpu", "medusa", 4, None),  # no test replays it
        ("sim", "draft_model", 4, [5, 10]),
        ("sim", "ngram", 15, [16]),
        ("sim", "ngram", 16, None),
    ],
)
def test_graphs_take_whole_drafts(device: str, method: str, drafts: int, sizes: list[int] | None) -> None:
    config, chosen = speculating(method, drafts), choose(name=device)
    graphs.set_compilation_defaults(config, chosen)
    compilation = config.compilation_config
    assert (compilation.cudagraph_mode == CUDAGraphMode.NONE) == (sizes is None)
    assert (compilation.cudagraph_capture_sizes or None) == sizes


# --- attention ----------------------------------------------------------------------------------------------------


def attention(**requested: Any) -> AttentionSelectorConfig:
    given: dict[str, Any] = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**{**given, **requested})


def test_another_attention_backend() -> None:
    assert backend_path(None, attention(), CpuDevice()) == BACKEND
    assert backend_path(AttentionBackendEnum.CUSTOM, attention(), CpuDevice()) == BACKEND
    assert backend_path(None, attention(use_mla=True), CpuDevice()) == MLA_BACKEND
    with pytest.raises(BackplaneError, match=r"FLASH_ATTN was requested, .* CUSTOM only; remove --attention-backend"):
        backend_path(AttentionBackendEnum.FLASH_ATTN, attention(), CpuDevice())


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        ({"use_mla": True, "use_sparse": True}, "sparse"),
        ({"use_mla": True, "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "partial multimodal token"),  # Gemma 3, PaliGemma: docs/serve/model-families.md
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"dtype": torch.float64}, r"compute in torch\.fl"),
    ],
)
def test_attention_that_is_not_there(requested: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackplaneError, match=rf"not supported on device 'cpu': .*{reason}"):
        backend_path(None, attention(**requested), CpuDevice())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_kv_heads": 4}, "6 query heads are not a multiple of 4 key/value heads; choose a --tensor-parallel-size"),
        (
            {"sinks": torch.zeros(5)},
            "has 5 attention sinks for 6 heads, which does not match its configuration; choose",
        ),
        ({"kv_cache_dtype": "nvfp4"}, "KV cache dtype 'nvfp4' is not supported; choose among auto, fp8"),
    ],
)
def test_heads_sinks_and_storage_that_do_not_fit(given: dict[str, Any], expected: str) -> None:
    BackplaneAttentionImpl(6, 64, 1.0, num_kv_heads=3, sinks=torch.zeros(6))
    with pytest.raises(BackplaneError, match=expected):
        BackplaneAttentionImpl(6, 64, 1.0, **given)


# --- weights that workers share -----------------------------------------------------------------------------------


@pytest.mark.feature("Weights: shared between the workers of a host", "sim", refused=True)
@pytest.mark.parametrize("load_format", ["backplane_shared", "backplane_shared_gguf"])
def test_weights_are_shared_in_the_hosts_memory_alone(load_format: str) -> None:
    config = VllmConfig(load_config=LoadConfig(load_format=load_format))
    refusals.refuse_unsupported(config, configured({}))
    with pytest.raises(
        BackplaneError, match=r"on device 'sim' each worker has its weights in .* its own card; remove the"
    ):
        refusals.refuse_unsupported(config, choose(name="sim"))


def test_weights_that_are_shared_do_not_sleep() -> None:
    config = VllmConfig(load_config=LoadConfig(load_format="backplane_shared"))
    config.model_config = SimpleNamespace(enable_sleep_mode=False)  # type: ignore[assignment]
    refusals.refuse_unshareable(config, configured({}).device)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(BackplaneError, match=r"--enable-sleep-mode .* remove one of the two"):
        refusals.refuse_unshareable(config, configured({}).device)


# --- weights from a running server --------------------------------------------------------------------------------


def offering() -> Runtime:
    return configured({"backplane": {"weights_listen": "127.0.0.1:9100"}})


def fetching(**extra: Any) -> VllmConfig:
    return VllmConfig(load_config=LoadConfig(load_format="backplane_peer", model_loader_extra_config=extra))


def test_weights_are_fetched_from_an_address_that_is_stated() -> None:
    refusals.refuse_unfetchable(fetching(peer="127.0.0.1:9100"), configured({}))
    with pytest.raises(ValueError, match="lacks 'peer', the address at which a running server offers its weights; add"):
        fetching()


def test_weights_are_offered_at_an_address_of_this_host() -> None:
    with pytest.raises(OptionError, match=r"weights_listen is '10\.1\.1\.1:9'; expected an address of this host"):
        configured({"backplane": {"weights_listen": "10.1.1.1:9"}})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"quantization": "int8"}, r"weights_listen does not support quantized weights \(int8\)"),
        ({"enable_sleep_mode": True}, r"remove it, or --enable-sleep-mode"),
    ],
)
def test_models_that_are_not_offered(change: dict[str, Any], expected: str) -> None:
    config = VllmConfig()
    given = {"quantization": None, "enable_sleep_mode": False}
    config.model_config = SimpleNamespace(**given)  # type: ignore[assignment]
    refusals.refuse_unfetchable(config, offering())
    config.model_config = SimpleNamespace(**given | change)  # type: ignore[assignment]
    refusals.refuse_unfetchable(config, configured({}))
    with pytest.raises(BackplaneError, match=expected):
        refusals.refuse_unfetchable(config, offering())


def test_weights_of_several_replicas_or_with_adapters_are_not_offered() -> None:
    config = VllmConfig()
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(
        BackplaneError, match="weights_listen supports one replica only; remove it, or --data-parallel-size"
    ):
        refusals.refuse_unfetchable(config, offering())
    config = VllmConfig()
    config.lora_config = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(BackplaneError, match="does not support LoRA adapters; remove it, or --enable-lora"):
        refusals.refuse_unfetchable(config, offering())


# --- the worker's card --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "replica", "card"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 0, None), (1, 1, None)])
def test_a_worker_for_which_there_is_no_card(rank: int, replica: int, card: int | None) -> None:
    worker = BackplaneWorker.__new__(BackplaneWorker)  # without starting a process
    worker.runtime = cards()
    worker.backplane_device = worker.runtime.device
    worker.parallel_config = ParallelConfig()
    worker.parallel_config.data_parallel_rank_local = replica
    worker.local_rank = rank
    if card is not None:
        assert worker._card() == card
        return
    expected = (
        rf"worker {rank + replica} is to use card 2, and device 'card' has 2; .* or correct BACKPLANE_VISIBLE_CARDS"
    )
    with pytest.raises(BackplaneError, match=expected):
        worker._card()


def test_graphs_are_not_larger_than_a_step() -> None:
    """Tests a token budget below the device's capture sizes, which vLLM would refuse."""
    config = speculating("ngram", 4, tokens=12)
    graphs.set_compilation_defaults(config, choose(name="cpu"))
    assert config.compilation_config.cudagraph_capture_sizes == [5, 10]
    config = speculating("ngram", 4, tokens=4)
    graphs.set_compilation_defaults(config, choose(name="cpu"))
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"lora_config": LoRAConfig(max_lora_rank=8)},
            "of a batch; remove -cc.cudagraph_mode, or remove --enable-lora",
        ),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="Foreign")}, "'Foreign' runs code in every layer; remove"),
        (
            {"speculative_config": SimpleNamespace(method="medusa", num_speculative_tokens=2)},
            "speculative method 'medusa'",
        ),
        ({"parallel_config": SimpleNamespace(world_size=2, world_size_across_dp=2)}, "collectives of several workers"),
        ({"parallel_config": SimpleNamespace(world_size=1, world_size_across_dp=2)}, "replicas decide together"),
        ({"use_v2_model_runner": True}, "or set VLLM_USE_V2_MODEL_RUNNER=0"),
        (
            {"model_config": SimpleNamespace(runner_type="pooling", is_encoder_decoder=False)},
            "a pooling model has no decode steps",
        ),
        (
            {"model_config": SimpleNamespace(runner_type="generate", is_encoder_decoder=True)},
            "encoder-decoder model",
        ),
    ],
)
def test_requested_graphs_meet_the_check_of_the_default(change: dict[str, Any], expected: str) -> None:
    config, chosen = speculating("", 0), choose(name="cpu")
    config.kernel_config = SimpleNamespace()
    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    graphs.check_compilation(config, chosen)
    vars(config).update(change)
    with pytest.raises(BackplaneError, match=expected):
        graphs.check_compilation(config, chosen)


def test_graphs_that_hold_fewer_tokens_than_a_draft() -> None:
    config, chosen = speculating("ngram", 4), choose(name="cpu")
    config.compilation_config.max_cudagraph_capture_size = 4
    graphs.set_compilation_defaults(config, chosen)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE, "the user did not request graphs"
    config = speculating("ngram", 16)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    with pytest.raises(BackplaneError, match=r"at most 16 tokens; lower num_speculative_tokens, .* or remove -cc"):
        graphs.set_compilation_defaults(config, choose(name="sim"))
