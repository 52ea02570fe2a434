"""Holds the worker and its parts: memory budget, KV cache storage, sleep mode, profiling and the numeric guard.

vLLM imports `worker.py` by name.
"""
