"""Provides two versions of a small package called vllm, for tests that compare versions."""

from __future__ import annotations

from pathlib import Path

OLD = {
    "__init__": "from vllm.version import __version__\n",
    "version": "__version__ = '1.0.0'\n",
    "_version": "__version__ = version = '1.0.0'\n",
    "envs": "import os\nenvironment_variables = {'VLLM_OLD': lambda: 1, 'VLLM_BOTH': lambda: 2}\n",
    "ops": '''
SIZE = 3
LIMIT = 3


def fast_norm(x):
    return x + 1


def same(x):
    """One."""
    return [x,
            x]


def dropped(x):
    return x
''',
    "engine": '''
class Engine:
    """Runs."""

    def step(self, batch):
        return batch

    def stop(self):
        # for now
        return None

    def drain(self):
        return None
''',
    "worker": """
class Worker:
    def __init__(self):
        self.device = None
        self.cache = {}

    def load(self):
        return None

    def run(self, batch, flag=False):
        return batch

    def warm_up(self):
        return None

    def place(self, device):
        return None
""",
    "custom_op": "class CustomOp:\n    @classmethod\n    def register_oot(cls, op=None, name=None):\n     "
    "   return op\n",
    "layers": (
        "from vllm.custom_op import CustomOp\n\n\n"
        "class Norm(CustomOp):\n    pass\n\n\nclass Gelu(CustomOp):\n    pass\n"
    ),
    "kernels": """
class Jit:
    def dispatch(self, **kwargs):
        return None

    def launch(self, *args):
        return None


class Layer:
    def forward(self, x):
        return x


class Norm(Layer):
    def forward(self, x):
        return x


class Single:
    def prepare_once(self, x):
        return x


def run(layer, single):
    layer.forward(x=1)
    single.prepare_once(x=1)
"""
    + "".join(f"\n\nclass Layer{number}:\n    def forward(self, x):\n        return x\n" for number in range(9)),
    "old_home": "class Mover:\n    def move(self):\n        return 1\n",
}

NEW = {
    **OLD,
    "version": "__version__ = '2.0.0'\n",
    "_version": "__version__ = version = '2.0.0'\n",
    "envs": "import os\nenvironment_variables = {'VLLM_NEW': lambda: 1, 'VLLM_BOTH': lambda: 2}\n",
    "ops": '''
SIZE = 4
LIMIT = 3  # as before


def fast_norm(x):
    return x + 2


def same(x):
    """Two."""
    return [x, x]  # on one line
''',
    "engine": '''
class Engine:
    """Runs faster."""

    def step(self, batch):
        return batch or None

    def stop(self):
        return None
''',
    "worker": """
class Worker:
    def __init__(self):
        self.device = None

    def load(self):
        return None

    def run(self, batch, flag=False, *, stream):
        return batch

    def place(self, target):
        return None
""",
    "layers": (
        "from vllm.custom_op import CustomOp\n\n\n"
        "class RootMeanSquare(CustomOp):\n    pass\n\n\nclass Gelu(CustomOp):\n    pass\n"
    ),
    "new_home": OLD["old_home"],
}
del NEW["old_home"]


def write_tree(folder: Path, modules: dict[str, str]) -> Path:
    """Writes a source tree with these modules in its package vllm. Slashes in their names make folders."""
    for name, source in modules.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder
