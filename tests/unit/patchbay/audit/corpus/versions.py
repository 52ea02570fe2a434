# ruff: noqa
#: case patched function changed | old new
import vllm.ops

vllm.ops.fast_norm = print  # expect: BP202

#: case patched function changed in comments only | old new
import vllm.ops

vllm.ops.same = print
vllm.ops.LIMIT = 4

#: case patched method changed | old new
from vllm.engine import Engine

Engine.step = None  # expect: BP202
Engine.stop = None

#: case patched method went | old new
from vllm.engine import Engine

Engine.drain = None  # expect: BP201

#: case patched constant changed | old new
import vllm.ops

vllm.ops.SIZE = 1  # expect: BP202

#: case patched class moved and did not change | old new
try:
    from vllm.new_home import Mover
except ImportError:
    from vllm.old_home import Mover

Mover.move = None

#: case module that moved | old new
from vllm.old_home import Mover  # expect: BP101

#: case module that came | old new
from vllm.new_home import Mover  # expect: BP101

#: case both, by version | old new
import vllm
from packaging.version import Version

if Version(vllm.__version__) >= Version("2"):
    from vllm.new_home import Mover
else:
    from vllm.old_home import Mover

Mover.move = None

#: case both, by helper | old new
from plug.tools import vllm_version_is

if vllm_version_is("1.0.0"):
    from vllm.old_home import Mover
else:
    from vllm.new_home import Mover

#: case wrong way round | old new
from plug.tools import vllm_version_is

if vllm_version_is("1.0.0"):
    from vllm.new_home import Mover  # expect: BP101
else:
    from vllm.old_home import Mover  # expect: BP101

#: case override of a method whose signature changed | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def run(self, batch, flag=False):  # expect: BP401
        return None

    def load(self):
        return None


#: case override that fits both | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def run(self, batch, flag=False, *, stream=None):
        return None


#: case override of a method that went | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def warm_up(self):  # expect: BP402
        return None

    def own(self):
        return None


#: case renamed argument | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def place(self, device):  # expect: BP401
        return None


#: case inherited attribute that went | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def own(self):
        return self.cache, self.device  # expect: BP404


#: case inherited attribute that went, and is asked for | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def own(self):
        if hasattr(self, "cache"):
            return self.cache
        return getattr(self, "cache", None)


#: case inherited attribute that the plugin sets itself | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def own(self):
        return self.cache


#: case call of a method that went | old new
from vllm.worker import Worker


class PlugWorker(Worker):
    def start(self):
        super().warm_up()  # expect: BP403


#: case registration of a layer that was renamed | old new
from vllm.custom_op import CustomOp


@CustomOp.register_oot(name="Norm")  # expect: BP301
class PlugNorm:
    pass


@CustomOp.register_oot(name="Gelu")
class PlugGelu:
    pass


#: case variable that went | old new
import os

os.environ["VLLM_OLD"] = "1"  # expect: BP601
os.environ["VLLM_BOTH"] = "1"

#: case symbol that went | old new
from vllm.ops import dropped, fast_norm  # expect: BP102

#: case symbol that went, guarded by its presence | old new
import vllm.ops as ops

if hasattr(ops, "dropped"):
    ops.dropped = print

#: case patched through setattr, by table | old new
import vllm.ops

for name in ("fast_norm", "same"):  # expect: BP202
    setattr(vllm.ops, name, print)

#: case whole class replaced | old new
import vllm.engine


class Engine:
    pass


vllm.engine.Engine = Engine  # expect: BP202

#: case nothing of vLLM | old new
import os


class Worker:
    cache = 3

    def run(self, a, b, c):
        return self.cache, self.anything
