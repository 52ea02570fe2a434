"""Implements vLLM's attention interface with the operators of `ops/`: backends, metadata and their selection."""

from __future__ import annotations
