# ruff: noqa
#: case version in a walrus
import vllm
from packaging.version import Version

if (found := Version(vllm.__version__)) >= Version("0.20"):
    from vllm.utils import cdiv  # expect: BP102
else:
    from vllm.worker.worker import Worker

#: case envs as a name of the package
from vllm import envs

A = envs.VLLM_PLUGINS
B = envs.VLLM_USE_V1  # expect: BP601

#: case whole path written out
import vllm.v1.core.sched.scheduler

vllm.v1.core.sched.scheduler.Scheduler.schedule = None
vllm.v1.core.sched.scheduler.Scheduler.plan = None  # expect: BP201

#: case renamed import
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler

_Scheduler.schedule = None
_Scheduler.plan = None  # expect: BP201

#: case vLLM may be missing altogether
try:
    import vllm
except ImportError:
    vllm = None

if vllm is not None:
    LAYER = vllm.attention.layer.Attention  # expect: BP103

#: case several targets at once
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.schedule, Scheduler.plan = print, print  # expect: BP201

#: case one value for several targets
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.schedule = Scheduler.plan = print  # expect: BP201

#: case mock of a module that went
from unittest import mock


def test_it():
    with mock.patch("vllm.attention.layer.Attention"):  # expect: BP103
        pass


#: case chain of versions
import vllm
from packaging.version import Version

V = Version(vllm.__version__)
if V < Version("0.10"):
    from vllm.worker.worker import Worker
elif V < Version("0.20"):
    from vllm.attention.layer import Attention
else:
    from vllm.v1.worker.gpu_worker import Worker

#: case version of Python is no guard
import sys

if sys.version_info >= (3, 11):
    from vllm.worker.worker import Worker  # expect: BP101

#: case negated helper
from plug.tools import vllm_version_is

if not vllm_version_is("0.33.0"):
    from vllm.worker.worker import Worker

#: case one of two helpers
from plug.tools import vllm_version_is

if vllm_version_is("0.30.0") or vllm_version_is("0.31.0"):
    from vllm.worker.worker import Worker

#: case helper that patches
from vllm.v1.core.sched.scheduler import Scheduler


def replace(owner, name, new):
    setattr(owner, name, new)


replace(Scheduler, "schedule", print)
replace(Scheduler, "plan", print)  # expect: BP201

#: case deleted attribute
from vllm.v1.core.sched.scheduler import Scheduler

del Scheduler.plan  # expect: BP103

#: case built-in import
module = __import__("vllm.worker.worker")  # expect: BP101

#: case attribute of an imported module
import importlib

cdiv = getattr(importlib.import_module("vllm.utils"), "cdiv")  # expect: BP103

#: case base class written out
import vllm.v1.core.sched.scheduler


class Mine(vllm.v1.core.sched.scheduler.Scheduler):
    def update_from_output(self):  # expect: BP401
        return None


#: case generic base class
from vllm.v1.attention.backend import AttentionMetadataBuilder


class Metadata:
    pass


class Builder(AttentionMetadataBuilder[Metadata]):
    def build(self, common_prefix_len, common_attn_metadata):  # expect: BP401
        return None


#: case decorated override
import torch
from vllm.v1.worker.gpu_worker import Worker


class Mine(Worker):
    @torch.inference_mode()
    def execute_model(self, scheduler_output):
        return None

    @torch.inference_mode()
    def determine_available_memory(self, fraction):  # expect: BP401
        return 0


#: case override by assignment
from vllm.v1.worker.gpu_worker import Worker


def run(self, output):
    return None


class Mine(Worker):
    execute_model = run
    sleep = None


#: case handler that only logs
import logging

try:
    from vllm.sequence import SequenceGroup  # expect: BP102 note
except (ImportError, AttributeError) as fault:
    logging.warning("no groups: %s", fault)

#: case try without handlers
try:
    from vllm.worker.worker import Worker  # expect: BP101
finally:
    pass

#: case flag that ends the import
try:
    from vllm.attention.layer import Attention  # expect: BP101 note

    HAS_OLD = True
except ImportError:
    HAS_OLD = False

if not HAS_OLD:
    raise ImportError("too new")

from vllm.attention.other import Thing

#: case environment is no guard
import os

if os.environ.get("PLUG_OLD"):
    from vllm.worker.worker import Worker  # expect: BP101


#: case function called where failures are caught
def old_patches():
    from vllm.worker.worker import Worker  # expect: BP101 note

    Worker.execute_model = None


try:
    old_patches()
except Exception:
    pass


#: case function called in both ways
def old_patches():
    from vllm.worker.worker import Worker  # expect: BP101


try:
    old_patches()
except ImportError:
    pass


def later():
    old_patches()


#: case name of a class of the plugin that is also upstream's
from vllm.v1.core.sched import scheduler


class Scheduler(scheduler.Scheduler):
    def schedule(self, throttle_prefills=False):
        return None


scheduler.Scheduler = Scheduler
Scheduler.plan = None

#: case patched in a function through a global
Target = None


def load():
    global Target
    from vllm.v1.core.sched.scheduler import Scheduler

    Target = Scheduler


def apply():
    Target.schedule = None
    Target.plan = None  # expect: BP201


#: case class looked up in a loop of modules
import vllm.utils
import vllm.utils.math_utils

for module in [vllm.utils, vllm.utils.math_utils]:
    if hasattr(module, "cdiv"):
        module.cdiv = None

#: case conditional base class
try:
    from vllm.attention.backends.abstract import AttentionBackend as Base
except ImportError:
    from vllm.v1.attention.backend import AttentionBackend as Base


class Backend(Base):
    @staticmethod
    def get_name(prefix):  # expect: BP401
        return "PLUG"

    @staticmethod
    def get_impl_cls():
        return object


#: case comprehension and lambda
import vllm.utils as utils

SIZES = [utils.cdiv(n, 2) for n in range(3)]  # expect: BP103
LATER = lambda n: utils.cdiv(n, 2)  # expect: BP103

#: case default argument
import vllm.utils as utils


def size(n, divide=utils.cdiv):  # expect: BP103
    return divide(n, 2)


#: case decorator of vLLM that went
import vllm.compilation.decorators as decorators


@decorators.support_torch_compile
class A:
    pass


@decorators.support_static_graph  # expect: BP103
class B:
    pass


#: case version compared the other way round
import vllm
from packaging.version import Version

if Version("0.20") > Version(vllm.__version__):
    from vllm.worker.worker import Worker

#: case version without its suffix
import vllm
from packaging.version import Version

if Version(vllm.__version__.split("+")[0]) < Version("0.20"):
    from vllm.worker.worker import Worker
if Version(Version(vllm.__version__).base_version) < Version("0.20"):
    from vllm.worker.worker import Worker
if Version(vllm.__version__).release[:2] < (0, 20):
    from vllm.worker.worker import Worker

#: case version of another package
import torch
from packaging.version import Version

if Version(torch.__version__) < Version("1.0"):
    from vllm.worker.worker import Worker  # expect: BP101 note

#: case registered under the class's own name
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm


class PlugNorm(RMSNorm):
    pass


CustomOp.register_oot(_decorated_op_cls=PlugNorm, name=RMSNorm.__name__)
CustomOp.register_oot(PlugNorm, "RMSNorms")  # expect: BP301

#: case names from a star import of the plugin
from plug.names import *

Scheduler.schedule = None
Scheduler.plan = None  # expect: BP201
#: file names.py
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["Scheduler"]


#: case async function and context
async def run(client):
    async with client:
        from vllm.engine.async_llm_engine import AsyncLLMEngine

        from vllm.worker.worker import Worker  # expect: BP101


#: case nested class reads its enclosing module
import vllm.utils as utils


class Outer:
    utils = 3

    class Inner:
        def run(self):
            return utils.cdiv(1, 2)  # expect: BP103
