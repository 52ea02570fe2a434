"""The command: `python -m benchmarks.compare`, or `make bench`."""

import sys

from benchmarks.compare.cli import main

sys.exit(main())
