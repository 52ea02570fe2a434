"""Adapts the processes of an engine: PyTorch calls that assume CUDA, sockets that a fork inherits, processes whose
server is gone, and ranks that fail in a step.
"""
