# ruff: noqa
#: case a patch that does nothing, and an unrelated object with an attribute of the name
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.run = None  # expect: BP201
#: file other.py
import subprocess

subprocess.run(["ls"])

#: case a patch that does nothing, and an unrelated class with a method of the name
from vllm.v1.core.sched.scheduler import Scheduler


def schedule_running(self):
    return None


Scheduler._schedule_running = schedule_running  # expect: BP201


class Mine:
    def _schedule_running(self):
        return None

    def go(self):
        return self._schedule_running()


#: case an unrelated subclass of vLLM reads an attribute of the name
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker

Scheduler._plug_limit = 3  # expect: BP201


class PlugWorker(Worker):
    _plug_limit = 4

    def limit(self):
        return self._plug_limit


#: case something that is not followed has an attribute of the name
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.dispatch = None  # expect: BP201


def go(executor):
    return executor.pool.dispatch()


#: case a subclass in another file reads what was set
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_limit = 3  # expect: BP201 note
#: file mine.py
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    def limit(self):
        return self._plug_limit


#: case a replacement in another file reads what was set
from plug.impl import schedule
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_original = Scheduler.schedule  # expect: BP201 note
Scheduler.schedule = schedule


#: file impl.py
def schedule(self, throttle_prefills=False):
    return self._plug_original(throttle_prefills)


#: case a replacement made by a decorator reads what was set
from functools import wraps

from vllm.v1.core.sched.scheduler import Scheduler


def counted(function):
    @wraps(function)
    def wrapper(self, *args, **kwargs):
        self._plug_calls += 1
        return function(self, *args, **kwargs)

    return wrapper


Scheduler._plug_calls = 0  # expect: BP201 note
Scheduler.schedule = counted(Scheduler.schedule)


#: case a function that is given the class reads what was set
from vllm.v1.core.sched.scheduler import Scheduler


def is_patched(cls):
    return getattr(cls, "_plug_patched", False)


def apply():
    if not is_patched(Scheduler):
        Scheduler._plug_patched = True  # expect: BP201 note


#: case an annotated argument reads what was set
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_limit = 3  # expect: BP201 note


def limit(scheduler: "Scheduler | None"):
    return scheduler._plug_limit


#: case the class itself is asked for what was set
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler._plug_original = Scheduler.schedule  # expect: BP201 note


def schedule(self, throttle_prefills=False):
    return Scheduler._plug_original(self, throttle_prefills)


Scheduler.schedule = schedule

#: case second number of the version
import vllm

minor = int(vllm.__version__.split(".")[1])
if minor < 30:
    from vllm.gone import A
if minor >= 30:
    from vllm.gone import B  # expect: BP101

#: case parts of a version object
import vllm
from packaging.version import Version

v = Version(vllm.__version__)
if v.minor < 30:
    from vllm.gone import A
if (v.major, v.minor) < (0, 30):
    from vllm.gone import B
if (v.major, v.minor) >= (0, 30):
    from vllm.gone import C  # expect: BP101
if v.release[1] < 30:
    from vllm.gone import D

#: case numbers unpacked from the version
import vllm

major, minor = [int(x) for x in vllm.__version__.split(".")[:2]]
if (major, minor) < (0, 30):
    from vllm.gone import A
if minor >= 30:
    from vllm.gone import B  # expect: BP101

#: case tuple of numbers
import vllm

if tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 30):
    from vllm.gone import A
NUMBERS = tuple(int(part) for part in vllm.__version__.split(".")[:2])
if NUMBERS >= (0, 30):
    from vllm.gone import B  # expect: BP101

#: case match on the version
import vllm

match vllm.__version__:
    case "0.29.0" | "0.29.1":
        from vllm.gone import A
    case "0.33.0":
        from vllm.gone import B  # expect: BP101
    case _:
        from vllm.gone import C

#: case match on the version, not understood
import vllm

match vllm.__version__.replace("v", ""):
    case "0.29.0":
        from vllm.gone import A  # expect: BP101 note

#: case chained comparison
import vllm
from packaging.version import Version as V

if V("0.28") <= V(vllm.__version__) < V("0.30"):
    from vllm.gone import A
if V("0.30") <= V(vllm.__version__) < V("1"):
    from vllm.gone import B  # expect: BP101

#: case specifiers
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if vllm.__version__ in SpecifierSet("<0.30"):
    from vllm.gone import A
if SpecifierSet("<0.30").contains(Version(vllm.__version__)):
    from vllm.gone import B
if vllm.__version__ in SpecifierSet(">=0.30"):
    from vllm.gone import C  # expect: BP101

#: case tests that are skipped by version
import unittest

import pytest
import vllm
from packaging.version import Version

old_only = pytest.mark.skipif(Version(vllm.__version__) >= Version("0.30"), reason="old")


@pytest.mark.skipif(Version(vllm.__version__) >= Version("0.30"), reason="old")
def test_a():
    from vllm.gone import A


@old_only
def test_b():
    from vllm.gone import B


@unittest.skipUnless(Version(vllm.__version__) < Version("0.30"), "old")
class TestC:
    def test_c(self):
        from vllm.gone import C


@pytest.mark.skipif(Version(vllm.__version__) < Version("0.30"), reason="new")
def test_d():
    from vllm.gone import D  # expect: BP101


#: case a file of tests that is skipped by version
import pytest
import vllm
from packaging.version import Version

pytestmark = pytest.mark.skipif(Version(vllm.__version__) >= Version("0.30"), reason="old")


def test_a():
    from vllm.gone import A


#: case something made of the version that is not understood
import re

import vllm

numbers = [int(n) for n in re.findall("[0-9]+", vllm.__version__)]
is_recent = numbers[1] > 30 or numbers[0] > 0
if not is_recent:
    from vllm.gone import A  # expect: BP101 note
if numbers[1] < 30:
    from vllm.gone import B  # expect: BP101 note

#: case something made of the version in another file
from plug.compat import MINOR, before

if MINOR < 30:
    from vllm.gone import A  # expect: BP101 note
if before("0.30"):
    from vllm.gone import B  # expect: BP101 note
#: file compat.py
import vllm
from packaging.version import Version

MINOR = int(vllm.__version__.split(".")[1])


def before(text):
    mine = Version(vllm.__version__)
    return mine < Version(text)


#: case a number of the plugin's own is no guard
from plug.compat import MOST

if MOST < 30:
    from vllm.gone import A  # expect: BP101
#: file compat.py
MOST = 29

#: case read in a formatted string
import vllm.envs as envs
from vllm.v1.core.sched.scheduler import Scheduler

A = f"{Scheduler.gone!r:>{Scheduler.also_gone}}"  # expect: BP103, BP103
B = f"{Scheduler.schedule} {envs.VLLM_NOPE}"  # expect: BP601

#: case read in an exception handler and in a pattern
from vllm.v1.core.sched.scheduler import Scheduler

try:
    pass
except Scheduler.Gone:  # expect: BP103
    pass


def go(x):
    match x:
        case Scheduler.GONE:  # expect: BP103
            return 1
        case {"a": Scheduler.GONE_TOO}:  # expect: BP103
            return 2
        case Scheduler.schedule:
            return 3


#: case helper of another file that patches
from plug.util import patch_attr
from vllm.v1.core.sched.scheduler import Scheduler

patch_attr(Scheduler, "schedule", 1)
patch_attr(Scheduler, "plan", 1)  # expect: BP201


#: file util.py
def patch_attr(owner, name, value):
    setattr(owner, name, value)


#: case helper of another file, through the module
import plug.util as util
from vllm.v1.core.sched.scheduler import Scheduler

util.patch_attr(Scheduler, "plan", 1)  # expect: BP201


#: file util.py
def patch_attr(owner, name, value):
    setattr(owner, name, value)


#: case a mixin that overrides
from vllm.v1.worker.gpu_worker import Worker


class Mix:
    def execute_model(self):  # expect: BP401
        return None

    def helper(self):
        return None


class PlugWorker(Mix, Worker):
    pass


#: case a mixin that is behind
from vllm.v1.worker.gpu_worker import Worker


class Mix:
    def execute_model(self):
        return None


class PlugWorker(Worker, Mix):
    pass


#: case environment of another process, written as one dictionary
import os
import subprocess

subprocess.run(["true"], env={**os.environ, "VLLM_NOPE": "1", "VLLM_PLUGINS": ""})  # expect: BP601
subprocess.run(["true"], env=dict(os.environ, VLLM_NOPE="1"))  # expect: BP601
subprocess.run(["true"], env=os.environ | {"VLLM_NOPE": "1"})  # expect: BP601

#: case an attribute that each instance sets for itself
from vllm.v1.core.sched.scheduler import Scheduler

Scheduler.requests = {}  # expect: BP201

#: case a walrus as owner
from vllm.v1.core.sched import scheduler

(S := scheduler.Scheduler).plan = 1  # expect: BP201
S.plans = 2  # expect: BP201
S.schedule = 3

#: case a placeholder upstream takes any override | old new
from vllm.kernels import Jit


class Mine(Jit):
    def dispatch(self, x, y):
        return None

    def launch(self, grid):
        return None


#: case a name that many classes have is no evidence | old new
from vllm.kernels import Layer, Single


class Mine(Layer):
    def forward(self, hidden):  # expect: BP401 note
        return None


class Other(Single):
    def prepare_once(self, hidden):  # expect: BP401
        return None


#: case entry points as one text
X = 1
#: file setup.py
from setuptools import setup

setup(
    name="plug",
    entry_points="""
    [vllm.general_plugins]
    a = plug.case:X
    b = plug.case:gone
    """,
)
#: expect setup.py:8 BP501
