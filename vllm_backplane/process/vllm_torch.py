"""Gives vLLM's modules a module `torch` of their own, whose calls that assume CUDA reach the device.

vLLM calls `torch.cuda` and `torch.accelerator` on out-of-tree platforms too: it creates an event when the runner is
built, uses a stream for speculative decoding and for copies of results, and synchronizes when the process ends. It
takes streams and events from `torch.cuda` by name; its V2 model runner creates some in every step.

PyTorch itself stays as it is, because other code of the process may use a GPU: for it, an event that waits for nothing
would mean reading stale bytes. Only the global name `torch` of vLLM's modules refers to a view of PyTorch, in which

- the streams and events of a device that is PyTorch's accelerator replace those of `torch.cuda`: its device module has
  the same interface;
- host streams and events replace them if the device is not PyTorch's accelerator. Such a device has finished its work
  when a call returns, so there is nothing to wait for. Without an accelerator PyTorch raises in `torch.accelerator` and
  when an event is created. Here the device implements the calls of `torch.accelerator`.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import torch

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError
from vllm_backplane.guards import guarded
from vllm_patchbay.patch.import_hook import for_each_module


class HostEvent(torch.cpu.Event):
    """Implements an event for a device without streams: the work is done when the event is recorded.

    Arguments are ignored.
    """

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end._recorded - self._recorded) * 1000


class HostStream(torch.cpu.Stream):
    """Implements a stream for a device without streams. Its device and priority are ignored."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class View(ModuleType):
    """Shows a module with some attributes replaced or copied. It reads all others from the module, and writes them
    there."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__, module.__doc__)
        vars(self)["_viewed"] = module

    def replace(self, **attributes: Any) -> None:
        """Sets attributes in this view only, all at once."""
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._viewed, name, value)
        if name in vars(self):  # a copy
            vars(self)[name] = value


_torch, _cuda, _accelerator = View(torch), View(torch.cuda), View(torch.accelerator)
_bound = False


@guarded(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="V1 model runner",
    mentions=("torch.cuda", "torch.accelerator", "torch.Event"),
)
@guarded(
    "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.__init__",
    "vllm.v1.worker.gpu_model_runner:AsyncGPUPoolingModelRunnerOutput.__init__",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_or_create_async_output_copy_stream",
    "vllm.distributed.parallel_state:graph_capture",
    "vllm.distributed.parallel_state:GroupCoordinator.graph_capture",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="V1 model runner",
)
@guarded(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._copy_draft_token_ids_to_cpu",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._copy_valid_sampled_token_count",
    "vllm.v1.spec_decode.ngram_proposer_gpu:copy_num_valid_draft_tokens",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="speculation",
)
@guarded(
    "vllm.utils.torch_utils:current_stream",
    "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
)
@guarded(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="V2 model runner",
    mentions=("torch.cuda", "torch.accelerator", "torch.Event"),
)
@guarded(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.main_stream",
    "vllm.v1.worker.gpu.async_utils:AsyncOutput.__init__",
    "vllm.v1.worker.gpu.async_utils:AsyncPoolingOutput.__init__",
    "vllm.v1.worker.gpu.async_utils:stream",
    "vllm.v1.worker.gpu.pp_utils:PPHandler",
    "vllm.v1.worker.gpu.spec_decode.utils:DraftTokensHandler",
    "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="V2 model runner",
)
@guarded(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_sampler_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._cleanup_profiling_kv_cache",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_cudagraph_memory",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._capture_cudagraphs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.timed_encoder_operation",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.shutdown",
    why="what it calls of torch.accelerator is done by the device",
    feature="V1 model runner",
)
@guarded(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.shutdown",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.timed_encoder_operation",
    "vllm.v1.worker.gpu.spec_decode.eagle.utils:_should_share",
    why="what it calls of torch.accelerator is done by the device",
    feature="V2 model runner",
)
@guarded(
    "vllm.v1.worker.worker_base:WorkerBase.synchronize_device",
    "vllm.v1.worker.workspace:WorkspaceManager._ensure_workspace_size",
    "vllm.v1.worker.sentinel.gpu_worker_sentinel:WorkerSentinel.retry",
    "vllm.distributed.parallel_state:checkpoint_prepare_distributed_state",
    "vllm.distributed.parallel_state:checkpoint_restore_distributed_state",
    "vllm.distributed.parallel_state:cleanup_dist_env_and_memory",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "vllm.utils.mem_utils:release_device_memory_under_pressure",
    why="what it calls of torch.accelerator is done by the device",
)
@guarded(
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.update_weights",
    why="what it calls of torch.accelerator is done by the device",
    feature="weight transfer",
)
@guarded(
    "vllm.model_executor.models.gemma4_mm:Gemma4ForConditionalGeneration._process_image_input",
    "vllm.model_executor.models.gemma4_mm:Gemma4ForConditionalGeneration._process_video_input",
    why="the free memory that it reads is that of the device",
    feature="Gemma4ForConditionalGeneration",
)
@guarded(
    "vllm.model_executor.models.diffusion_gemma:DiffusionSampler.__call__",
    why="the free memory that it reads is that of the device",
    feature="DiffusionGemmaForConditionalGeneration",
)
@guarded(
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector:ExampleHiddenStatesConnector._get_copy_stream",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector:ExampleHiddenStatesConnector._submit_async_write",
    why="the streams and events that it takes from torch.cuda are those of the device or of the host",
    feature="ExampleHiddenStatesConnector",
)
def bind_torch_of_vllm(device: Device, card: int) -> None:
    """Routes the accelerator calls of vLLM's modules to a card of the device, for the rest of this process."""
    global _bound
    replaced: dict[str, Any] = {"cuda": _cuda, "accelerator": _accelerator}
    if not _is_accelerator(device):
        _replace_by_host_calls(device, card)
        replaced["Event"] = HostEvent
    elif device.capabilities.streams and torch.get_device_module(device.torch_type) is not torch.cuda:
        _replace_by_device_module(device)
    else:
        return
    # Attributes of torch are read in every step. A copy is found at once, and `__getattr__` finds what is added later.
    _torch.replace(**{**vars(torch), **replaced})
    if not _bound:
        for_each_module("vllm", _bind)
        _bound = True


def _bind(module: ModuleType) -> None:
    bound = vars(module).get("torch")
    if isinstance(bound, ModuleType) and bound.__name__ == torch.__name__:  # torch, or vLLM's lazy loader of it
        module.torch = _torch  # type: ignore[attr-defined]


def _is_accelerator(device: Device) -> bool:
    """Returns whether the device is PyTorch's accelerator. Raises if another device claims streams."""
    current = torch.accelerator.current_accelerator()
    is_accelerator = current is not None and current.type == device.torch_type
    if device.capabilities.streams and not is_accelerator:
        raise BackplaneError(
            f"device {device.name!r} claims streams, but PyTorch's accelerator is {current}, not "
            f"{device.torch_type!r}; register the device module and its accelerator hooks in Device.load()"
        )
    return is_accelerator


def _replace_by_device_module(device: Device) -> None:
    """Replaces the streams and events of `torch.cuda` with those of the device's own torch module."""
    module: Any = torch.get_device_module(device.torch_type)
    for name in ("Stream", "Event", "current_stream", "stream"):
        try:
            _cuda.replace(**{name: getattr(module, name)})
        except AttributeError:
            raise BackplaneError(
                f"device {device.name!r} claims streams, but torch.{device.torch_type} has no {name!r}; add it to the "
                "device module"
            ) from None


def _replace_by_host_calls(device: Device, card: int) -> None:
    """Replaces streams and events with those of the host, and calls of `torch.accelerator` with those of the device."""

    # Distinct functions: Dynamo keys its handling of synchronize by the object.
    def synchronize(_device: Any = None, /) -> None:
        device.synchronize()

    def empty_cache() -> None:
        device.empty_cache()

    def empty_host_cache() -> None:
        """Does nothing: the device has no pinned memory, so there is no cache of it."""

    def get_memory_info(_device: Any = None, /) -> tuple[int, int]:
        now = device.memory(card)
        return now.free, now.total

    def set_stream(_stream: Any) -> None:
        """Does nothing: there is only one stream."""

    _accelerator.replace(
        synchronize=synchronize,
        empty_cache=empty_cache,
        empty_host_cache=empty_host_cache,
        get_memory_info=get_memory_info,
    )
    _cuda.replace(
        Event=HostEvent,
        Stream=HostStream,
        current_stream=torch.cpu.current_stream,
        stream=torch.cpu.stream,
        set_stream=set_stream,
    )
