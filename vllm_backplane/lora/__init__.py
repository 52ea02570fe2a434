"""LoRA adapters: validation against the model, loading before a step, and the errors that clients receive.

The adapter arithmetic is in `punica.py`. The room may import `config/`, `distributed/`, `http/` and `ops/`.
"""
