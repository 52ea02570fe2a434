"""Offloads blocks of the KV cache to host memory or disk, up to a given size, and exchanges them with other servers of
the host. Only `connector.py`, `metrics.py` and `registration.py` import vLLM.
"""
