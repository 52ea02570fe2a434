"""Holds the patches for every process. They are applied when vLLM chooses the platform."""
