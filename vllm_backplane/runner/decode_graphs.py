"""Decode steps as graphs of the device.

vLLM decides which steps are replayed: its dispatcher pads a batch to a captured size and says so in the forward
context. Its own wrapper records CUDA graphs and keeps results by CUDA kernels of vLLM; this one stands in its place and
records through `device/graph.py`. Inputs of a step are the model's arguments and the tensors of the attention
metadata, which vLLM keeps in buffers that stay.
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
from vllm_backplane.layers.moe import BackplaneFusedMoEMethod
from vllm_backplane.ops.operator import get
from vllm_backplane.ops.resolution import Resolution

logger = init_logger("vllm." + __name__)


class StepGraphs(CUDAGraphWrapper):
    """The model, as the runner calls it."""

    def __init__(self, model: Callable[..., Any], vllm_config: VllmConfig, device: Device, card: int) -> None:
        # Not the parent's, which asks for a memory pool of CUDA. It is the class by which vLLM knows a wrapped model.
        self.runnable = model
        self.vllm_config = vllm_config
        self.runtime_mode = CUDAGraphMode.FULL
        self.is_debugging_mode = False
        self.calls = CapturedCalls(lambda: device.new_graph(card))
        self.while_serving = device.capabilities.capture_computes
        self.eager: set[Hashable] = set()
        """Steps that cannot be graphs."""
        self.suspended = False
        """Every step is eager, for something that looks on while Python calls the model."""
        CUDAGraphWrapper._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.calls.clear()
        self.eager.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode or self.suspended:
            return self.runnable(*args, **kwargs)
        inputs = _inputs(args, kwargs, context)
        key = context.batch_descriptor
        if self.while_serving:
            return self._served(key, lambda: self.runnable(*args, **kwargs), inputs)
        if key in self.calls:
            return self.calls.replay(key, inputs)
        validate_cudagraph_capturing_enabled()
        return self.calls.capture(key, lambda: self.runnable(*args, **kwargs), inputs)

    def _served(self, key: Hashable, call: Callable[[], Any], inputs: dict[str, torch.Tensor]) -> Any:
        """A step where captures compute: captured when it is first served, eager if it cannot be a graph."""
        if key in self.eager:
            return call()
        if key in self.calls:
            try:
                return self.calls.replay(key, inputs)
            except StaleInputError as error:  # nothing was computed yet
                self._give_up(key, error)
                return call()
        results: list[Any] = []

        def computed() -> Any:
            results.append(call())
            return results[0]

        try:
            return self.calls.capture(key, computed, inputs)
        except GraphError as error:
            self._give_up(key, error)
            return results[0] if results else call()  # no results: the capture did not even begin

    def _give_up(self, key: Hashable, error: GraphError) -> None:
        self.eager.add(key)
        logger.warning_once("Decode steps run eagerly, which is slower: %s", error)


def unrecordable(model: torch.nn.Module, operators: Iterable[Resolution]) -> list[str]:
    """What in a decode step of the model goes by what tensors hold, on the host. A capture that computes nothing cannot
    contain it."""
    found = {
        line.operator for line in operators if line.implementation == "reference" and get(line.operator).reads_values
    }
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    experts = [method for method in methods if isinstance(method, BackplaneFusedMoEMethod)]
    if not any(method.one_operator for method in experts):
        found.discard("moe_experts")
    if not all(method.one_operator for method in experts):
        found.add("quantized experts")
    return sorted(found)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any], context: ForwardContext) -> dict[str, torch.Tensor]:
    given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    found = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for title, by_layer in (("attention", context.attn_metadata), ("slots", getattr(context, "slot_mapping", None))):
        if not isinstance(by_layer, dict):
            continue
        # Layers of a group share theirs, which is called by the first of them.
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
