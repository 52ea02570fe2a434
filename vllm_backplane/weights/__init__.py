"""Ways to load a model that vLLM does not have, registered under a load format."""

from __future__ import annotations
