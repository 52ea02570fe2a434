"""Servers of one host that talk to each other: where they meet, how a worker answers and how it is asked, and how they
see that both have the same.

What is said is for others to know: `kv_tier/` asks for blocks, `model_loader/` for weights. Nothing here knows of them,
nor of vLLM.
"""
