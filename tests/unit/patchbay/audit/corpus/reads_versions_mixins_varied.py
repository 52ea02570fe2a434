# ruff: noqa
#: case mark read by a method of a mixin that is not combined here
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_ready = True  # expect: BP201


class Reader:
    def ready(self):
        return self._plug_ready


#: case saved original called by a nested function
from vllm.v1.core.sched.scheduler import Scheduler


def apply():
    Scheduler._plug_schedule = Scheduler.schedule  # expect: BP201 note

    def schedule(self, *args, **kwargs):
        return self._plug_schedule(*args, **kwargs)

    Scheduler.schedule = schedule


#: case saved original called by a lambda
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_schedule = Scheduler.schedule  # expect: BP201 note
Scheduler.schedule = lambda self, *args: self._plug_schedule(*args)

#: case mark asked of the type of self
from vllm.v1.core.sched.scheduler import Scheduler


def schedule(self, throttle_prefills=False):
    if type(self)._plug_traced:
        print("traced")
    return None


Scheduler._plug_traced = False  # expect: BP201 note
Scheduler.schedule = schedule

#: case module attribute that only another module has
import math

import vllm.utils

vllm.utils.isqrt = math.isqrt  # expect: BP201
print(math.isqrt(4))

#: case module attribute for the plugin's own use
import vllm.utils as utils

utils.plug_registry = {}  # expect: BP201 note


def register(name, value):
    utils.plug_registry[name] = value


#: case class attribute with a name that any class may have
from vllm.v1.worker.gpu_worker import Worker

Worker.close = None  # expect: BP201


def main(path):
    with open(path) as file:
        file.close()


#: case version read by a helper that unpacks it
import vllm


def numbers():
    major, minor, *_ = vllm.__version__.split(".")
    return int(major), int(minor)


if numbers() < (0, 30):
    from vllm.gone import A  # expect: BP101 note

#: case first numbers of the version, joined again
import vllm
from packaging.version import Version

base = ".".join(vllm.__version__.split(".")[:2])
if base == "0.29":
    from vllm.gone import A  # expect: BP101 note
if Version(base) < Version("0.30"):
    from vllm.gone import B  # expect: BP101 note

#: case version as a number
import vllm

if float(".".join(vllm.__version__.split(".")[:2])) < 0.3:
    from vllm.gone import A  # expect: BP101 note

#: case table by version
import vllm

PLACES = {"0.29.0": "vllm.gone", "0.30.0": "vllm.also_gone"}
place = PLACES.get(vllm.__version__)
if place:
    from vllm.gone import A  # expect: BP101 note

#: case second number out of a version tuple
from vllm.version import __version_tuple__ as numbers

if numbers[1] < 30:
    from vllm.gone import A
elif numbers[1] >= 32 and numbers[0] == 0:
    from vllm.gone import B  # expect: BP101

#: case while the version is old
import vllm
from packaging import version as pv

CURRENT = pv.parse(vllm.__version__)
assert pv.parse("0.20") <= CURRENT
if not pv.parse("0.30") <= CURRENT <= pv.parse("0.40"):
    from vllm.gone import A

#: case match on a tuple of numbers
import vllm
from packaging.version import Version

match Version(vllm.__version__).release[:2]:
    case (0, 29):
        from vllm.gone import A  # expect: BP101 note
    case _:
        from vllm.v1.core.sched.scheduler import Scheduler


#: case match on something else
def build(kind):
    match kind:
        case "old":
            from vllm.gone import A  # expect: BP101
        case _:
            return None


#: case class of tests that is skipped, and one that is not
import pytest
import vllm
from packaging.version import Version

OLD = Version(vllm.__version__) < Version("0.30")


@pytest.mark.skipif(not OLD, reason="gone")
class TestOld:
    def test_it(self):
        from vllm.gone import A


@pytest.mark.skipif(OLD, reason="not there yet")
class TestNew:
    def test_it(self):
        from vllm.gone import A  # expect: BP101


#: case setter of another file under another name
from plug.util import install as put
from vllm.v1.core.sched.scheduler import Scheduler

put(Scheduler, "schedule", None)
put(Scheduler, "plan", None)  # expect: BP201
put(Scheduler, __name__ + "x", None)  # expect: BP201


#: file util.py
def install(target, attribute, value, log=None):
    if log:
        log(attribute)
    setattr(target, attribute, value)


#: case function of another file that only looks
from plug.util import describe
from vllm.v1.core.sched.scheduler import Scheduler

print(describe(Scheduler, "plan"))


#: file util.py
def describe(target, attribute):
    return f"{target}.{attribute}"


#: case mixin in another file
from plug.mix import Logged
from vllm.v1.worker.gpu_worker import Worker


class PlugWorker(Logged, Worker):
    def load_model(self, *args, **kwargs):
        return super().load_model(*args, **kwargs)


#: file mix.py
class Logged:
    def execute_model(self, scheduler_output):
        return super().execute_model(scheduler_output)

    def load_model(self):
        return None

    def init_device(self, which):  # expect: BP401
        return None


#: case attribute that an instance may set later
from vllm.v1.worker.gpu_worker import Worker

Worker.profiler = None  # expect: BP201

#: case descriptor over what each instance sets
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.requests = property(lambda self: {}, lambda self, value: None)  # expect: BP901 note

#: case environment built up
import os

ENV = dict(os.environ)
ENV.update({"VLLM_NOPE": "1"})  # expect: BP601
env = os.environ.copy() | {"VLLM_NOPE": "1"}  # expect: BP601

#: case formatted string that names a module
import importlib

NAME = "worker"
importlib.import_module(f"vllm.{NAME}.worker")  # expect: BP101
