"""Adapts the processes of an engine: calls of PyTorch that assume CUDA, signals during the start, the shutdown of
engines at exit, sockets that a fork inherits, processes whose server is gone, and ranks that fail in a step.
"""
