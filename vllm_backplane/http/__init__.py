"""Holds the ASGI middlewares that Backplane adds to vLLM's HTTP server, and their common types.

This folder imports nothing of vLLM: the middlewares reach the engine through the application's state.
"""
