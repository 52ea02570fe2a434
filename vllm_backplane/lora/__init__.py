"""Serves LoRA adapters: validates them against the model, loads them before a step, and reports errors to clients.

The adapter arithmetic is in `punica.py`.
"""
