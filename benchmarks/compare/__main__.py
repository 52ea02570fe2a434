"""Runs the comparison as `python -m benchmarks.compare`, which `make bench` calls."""

import sys

from benchmarks.compare.cli import main

sys.exit(main())
