"""Makes imports of the package `benchmarks` work in a program that is started as `python benchmarks/X.py`.

Such a program has its own folder first on the import path, where `import benchmarks` finds this file. This file
therefore stands for the package.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
