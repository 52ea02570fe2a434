"""Connects servers of one host over TCP: loopback addresses, a threaded server, connections with a deadline, and
digests that show whether two servers have the same model. The payload protocols are in `kv_offload/` and `weights/`.
This folder imports nothing of vLLM.
"""
