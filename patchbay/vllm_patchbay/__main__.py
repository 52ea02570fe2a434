"""Runs the command ``vllm-patchbay`` as ``python -m vllm_patchbay``."""

from __future__ import annotations

import sys

from vllm_patchbay.cli import main

if __name__ == "__main__":
    sys.exit(main())
