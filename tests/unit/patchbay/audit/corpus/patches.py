# ruff: noqa
#: case method that went
from vllm.v1.core.sched.scheduler import Scheduler


def schedule_prefill(self):
    return None


Scheduler._schedule_prefill = schedule_prefill  # expect: BP201

#: case method that is there
from vllm.v1.core.sched.scheduler import Scheduler


def schedule(self, throttle_prefills=False):
    return None


Scheduler.schedule = schedule

#: case module function that went
import vllm.utils


def cdiv(a, b):
    return -(-a // b)


vllm.utils.cdiv = cdiv  # expect: BP201

#: case module function through an alias
import vllm.distributed.parallel_state as state


def grouped(*args, **kwargs):
    return None


state.init_model_parallel_group = grouped
state.init_model_parallel_groups = grouped  # expect: BP201

#: case inherited method
from vllm.v1.worker.gpu_worker import Worker

Worker.get_model_inspection = None
Worker.compile_or_warm_up_model = None

#: case instance attribute of the class
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.running = []  # expect: BP201

#: case setattr with a literal
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

setattr(GPUModelRunner, "_dummy_run", lambda self: None)
setattr(GPUModelRunner, "_dummy_runs", lambda self: None)  # expect: BP201

#: case setattr with a computed name
from vllm.v1.worker import gpu_model_runner


def replace(name, value):
    setattr(gpu_model_runner, name, value)  # expect: BP901 note


#: case local alias of the class
import vllm.v1.core.sched.scheduler as upstream

Target = upstream.Scheduler
Target.schedule = None
Target.schedule_all = None  # expect: BP201


#: case alias inside a function
def apply():
    from vllm.platforms import interface

    base = interface.PlatformEnum
    base.NPU = 7  # expect: BP201


#: case saved original
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_original_schedule = Scheduler.schedule  # expect: BP201 note


def schedule(self, throttle_prefills=False):
    return self._plug_original_schedule(throttle_prefills)


Scheduler.schedule = schedule

#: case mark that the patch is in place
from vllm.v1.core.sched.scheduler import Scheduler

if not getattr(Scheduler, "_plug_patched", False):
    Scheduler.schedule = None
    Scheduler._plug_patched = True  # expect: BP201 note

#: case original that is gone too
from vllm.v1.core.sched.scheduler import Scheduler

original = Scheduler._schedule_running  # expect: BP103


def patched(self):
    return original(self)


Scheduler._schedule_running = patched  # expect: BP201

#: case wrapped in place
import functools

from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.schedule = functools.wraps(Scheduler.schedule)(lambda self: None)
Scheduler.plan = functools.wraps(Scheduler.plan)(lambda self: None)  # expect: BP103, BP201

#: case two places, the one that is there
try:
    from vllm.attention.layer import Attention as Target
except ImportError:
    from vllm.v1.core.sched.scheduler import Scheduler as Target

Target.schedule = None

#: case two places, and the attribute in neither
try:
    from vllm.attention.layer import Attention as Target
except ImportError:
    from vllm.v1.core.sched.scheduler import Scheduler as Target

Target.forward_attention = None  # expect: BP201

#: case base class outside vLLM
from vllm.v1.sample.sampler import Sampler

Sampler.forward = None
Sampler.sample_on_device = None  # expect: BP901 note

#: case table of patches
import vllm.v1.core.sched.scheduler as sched

PATCHES = {
    "Scheduler": object,
    "SchedulerState": object,  # expect: BP201
}
for name, value in PATCHES.items():
    setattr(sched, name, value)

#: case loop over classes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

for cls in (Scheduler, Worker):
    cls.shutdown = None
    cls.shut_down_now = None  # expect: BP201, BP201

#: case shim for an attribute that is missing
import vllm.utils

if not hasattr(vllm.utils, "cdiv"):
    vllm.utils.cdiv = lambda a, b: -(-a // b)  # expect: BP201 note

#: case patch for an older version only
import vllm
from packaging.version import Version
from vllm.v1.core.sched.scheduler import Scheduler

if Version(vllm.__version__) < Version("0.20"):
    Scheduler._schedule_prefill = None

#: case instances and plugin objects are not patched
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler


class Mine(Scheduler):
    limit = 3

    def __init__(self, *args):
        super().__init__(*args)
        self.anything = 1


Mine.other = 2


def update(config: VllmConfig, scheduler):
    config.new_field = 1
    scheduler.also_new = 2


#: case mock of a path in a test
from unittest.mock import patch


@patch("vllm.v1.core.sched.scheduler.Scheduler.schedule")
def test_one(schedule):
    pass


@patch("vllm.v1.core.sched.scheduler.Scheduler.plan")  # expect: BP201
def test_two(plan):
    pass


#: case mock that may create
from unittest import mock

from vllm.v1.core.sched.scheduler import Scheduler


def test_it(monkeypatch):
    monkeypatch.setattr(Scheduler, "plan", None, raising=False)
    with mock.patch.object(Scheduler, "plan", create=True):
        pass
    with mock.patch.object(Scheduler, "plans"):  # expect: BP201
        pass


#: case module put in place under an old name
import sys

import plug.stub

sys.modules["vllm.attention"] = plug.stub  # expect: BP201

#: case stub for a module of other builds
import sys
import types

sys.modules["vllm._C"] = types.ModuleType("vllm._C")

#: case reached through sys.modules
import sys

sys.modules["vllm.v1.core.sched.scheduler"].Scheduler = object
sys.modules["vllm.v1.core.sched.scheduler"].Schedulers = object  # expect: BP201

#: case several files, the class comes through one of the plugin's own
from plug.upstream import Scheduler

Scheduler.schedule = None
Scheduler.plan = None  # expect: BP201
#: file upstream.py
from vllm.v1.core.sched.scheduler import Scheduler

#: case registry of a module
import vllm.model_executor.custom_op as custom_op

custom_op.op_registry.pop("rms_norm", None)
custom_op.oot_registry["RMSNorm"] = object  # expect: BP103

#: case augmented assignment reads first
import vllm.envs
import vllm.v1.core.sched.scheduler as sched

sched.LIMITS += 1  # expect: BP103

#: case methods of a class of the plugin, put onto vLLM's
from vllm.v1.core.sched.scheduler import Scheduler


class Lender:
    def schedule(self, throttle_prefills=False):
        return self._plug_schedule(throttle_prefills)

    def add_request(self, request):
        return self._plug_add(request)


Scheduler._plug_schedule = Scheduler.schedule  # expect: BP201 note
Scheduler._plug_add = Scheduler.add_request  # expect: BP201 note
Scheduler.schedule = Lender.schedule
for name in ("add_request",):
    setattr(Scheduler, name, getattr(Lender, name))


#: case a class in a function whose base is not known reads the name
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_size = 3  # expect: BP201


def make(base):
    class Made(base):
        def size(self):
            return self._plug_size

    return Made
