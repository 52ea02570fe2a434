"""ASGI middlewares that Backplane adds to vLLM's HTTP server, and their common types.

Imports nothing of vLLM: the middlewares reach the engine through the application's state.
"""
