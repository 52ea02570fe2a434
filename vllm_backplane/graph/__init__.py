"""Capture and replay: what a device with graphs implements, and what keeps replays honest. Knows nothing of vLLM."""

from vllm_backplane.graph.calls import CapturedCalls
from vllm_backplane.graph.interface import Graph

__all__ = ["CapturedCalls", "Graph"]
