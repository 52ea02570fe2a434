"""A second tier for the KV cache: blocks that vLLM has computed are kept in host memory or on disk, up to a bound,
and other servers of the host may have them.

Of all this `connector.py`, `statistics.py`, `registration.py` and `current.py` alone know vLLM.
"""
