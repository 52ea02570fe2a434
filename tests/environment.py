"""Holds the environment variables with which the tests were started.

Libraries set variables when they are imported. PyTorch, for example, sets the folder of its compiler's cache, and vLLM
the way in which it starts processes. Children of the tests do not inherit such variables: they would behave differently
depending on what the tests before them have imported, and warm_start.py could not fork them. tests/conftest.py imports
this module first.
"""

from __future__ import annotations

import os

AT_START = dict(os.environ)
