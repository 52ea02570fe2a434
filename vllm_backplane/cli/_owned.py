"""Runs a command of `vllm-backplane` as a process that ends with the process that started it."""

from __future__ import annotations

import sys

from vllm_backplane import cli
from vllm_backplane.process.owned_process import end_with_owner

if __name__ == "__main__":
    end_with_owner(int(sys.argv[1]))
    sys.exit(cli.main(sys.argv[2:]))
