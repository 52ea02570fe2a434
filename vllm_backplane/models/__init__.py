"""Downloads and prepares the bundled models, which `make serve` and the tests run. Imports nothing of vLLM."""

from vllm_backplane.models.bundled import DEFAULT, FULL_PRECISION, BundledModel, find, models
from vllm_backplane.models.cache import cache_folder, damage, obtain, packaged, prepared_folder

__all__ = [
    "DEFAULT",
    "FULL_PRECISION",
    "BundledModel",
    "cache_folder",
    "damage",
    "find",
    "models",
    "obtain",
    "packaged",
    "prepared_folder",
]
