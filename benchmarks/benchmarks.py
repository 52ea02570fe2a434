"""Lets `python benchmarks/X.py` import what X imports under `python -m benchmarks.X`.

A program that is started by its path has its own folder first on the path, and finds this file under the name of the
package that it is part of. So this file stands for the package.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
