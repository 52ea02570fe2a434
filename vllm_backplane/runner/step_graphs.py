"""Captures decode steps as graphs of the device, and replays them.

vLLM decides which steps are replayed: its dispatcher pads a batch to a captured size and announces that in the forward
context. vLLM's own wrapper captures CUDA graphs and stores their results through CUDA kernels of vLLM. The wrapper here
takes its place and captures through `device/graph.py`. The inputs of a step are the model's arguments and the tensors
of the attention metadata, which vLLM keeps in persistent buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context, is_forward_context_available
from vllm.logger import init_logger

from vllm_backplane.device import Device
from vllm_backplane.device.graph import CapturedCalls
from vllm_backplane.errors import GraphError, StaleInputError
from vllm_backplane.guards import guarded
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.metrics import steps
from vllm_backplane.ops.operator import operator_named
from vllm_backplane.ops.resolution import Resolution

logger = init_logger("vllm." + __name__)


@guarded(
    "vllm.compilation.cuda_graph:CUDAGraphWrapper",
    why="its constructor is not called, and graphs of the device are captured and replayed instead",
)
class StepGraphs(CUDAGraphWrapper):
    """Wraps the model for the runner: replays a captured decode step, captures a new one, or calls the model."""

    def __init__(self, model: Callable[..., Any], vllm_config: VllmConfig, device: Device, card: int) -> None:
        # The parent's constructor is not called, because it requests a memory pool of CUDA. The parent is needed as a
        # base class, by which vLLM recognizes a wrapped model.
        self.runnable = model
        self.vllm_config = vllm_config
        self.runtime_mode = CUDAGraphMode.FULL
        self.is_debugging_mode = False
        self.calls = CapturedCalls(lambda: device.new_graph(card))
        self.captures_while_serving = device.capabilities.capture_computes
        self.eager: set[Hashable] = set()
        """Batch descriptors of steps that cannot be captured."""
        self.suspended = False
        """Every step runs eagerly, because hooks on modules need Python to call the model."""
        self.outcome = ""
        """Why the last step was not replayed; empty if it was. Metrics show it."""
        CUDAGraphWrapper._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.calls.clear()
        self.eager.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode or self.suspended:
            self.outcome = steps.SUSPENDED if self.suspended else steps.NOT_CAPTURED
            return self.runnable(*args, **kwargs)
        self.outcome = ""
        inputs = _inputs(args, kwargs, context)
        key = context.batch_descriptor
        if self.captures_while_serving:
            return self._replay_or_capture(key, lambda: self.runnable(*args, **kwargs), inputs)
        if key in self.calls:
            return self.calls.replay(key, inputs)
        validate_cudagraph_capturing_enabled()
        return self.calls.capture(key, lambda: self.runnable(*args, **kwargs), inputs)

    def _replay_or_capture(self, key: Hashable, call: Callable[[], Any], inputs: dict[str, torch.Tensor]) -> Any:
        """Runs a step on a device whose captures also compute: captures it the first time, replays it later, and calls
        the model if the step cannot be captured."""
        if key in self.eager:
            self.outcome = steps.NOT_CAPTURABLE
            return call()
        if key in self.calls:
            try:
                return self.calls.replay(key, inputs)
            except StaleInputError as error:  # raised before anything was computed
                self._run_eagerly_from_now(key, error)
                return call()
        results: list[Any] = []
        self.outcome = steps.CAPTURE

        def computed() -> Any:
            results.append(call())
            return results[0]

        try:
            return self.calls.capture(key, computed, inputs)
        except GraphError as error:
            self._run_eagerly_from_now(key, error)
            return results[0] if results else call()  # without results the capture did not begin

    def _run_eagerly_from_now(self, key: Hashable, error: GraphError) -> None:
        self.eager.add(key)
        self.outcome = steps.NOT_CAPTURABLE
        logger.warning_once("Decode steps run eagerly, which is slower: %s", error)


def uncapturable(model: torch.nn.Module, operators: Iterable[Resolution]) -> list[str]:
    """Returns the operators and layers of a decode step that read tensor values on the host. A capture that computes
    nothing cannot contain them."""
    found = {
        line.operator
        for line in operators
        if line.implementation == "reference" and operator_named(line.operator).reads_values
    }
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    experts = [method for method in methods if isinstance(method, BackplaneFusedMoEMethod)]
    if not any(method.uses_fused_operator for method in experts):
        found.discard("moe_experts")
    if not all(method.uses_fused_operator for method in experts):
        found.add("quantized experts")
    return sorted(found)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext) -> dict[str, torch.Tensor]:
    """Returns the tensors that a step reads, by a name for error messages."""
    given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    found = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for title, by_layer in (("attention", context.attn_metadata), ("slots", getattr(context, "slot_mapping", None))):
        if not isinstance(by_layer, dict):
            continue
        # Layers of a group share one object, which is listed under the first layer's name.
        for layer, value in {id(value): (layer, value) for layer, value in reversed(by_layer.items())}.values():
            if isinstance(value, torch.Tensor):
                found[f"{title} of {layer}"] = value
            for name in _fields(value.__class__):
                if isinstance(held := getattr(value, name), torch.Tensor):
                    found[f"{name} of {layer}"] = held
    return found


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
