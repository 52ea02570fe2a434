"""The worker and its parts: memory budget, KV cache storage, sleep mode, profiling and the numeric guard.

vLLM imports `worker.py` by name. The room may import every other room except `doctor/` and `cli/`.
"""
