"""Connects servers of one host over TCP: loopback addresses, a threaded server, connections with a deadline, and
digests that show whether two servers have the same model. The payload protocols live in `kv_offload/` and `weights/`;
this room imports `errors` alone from this package, and nothing from vLLM.
"""
