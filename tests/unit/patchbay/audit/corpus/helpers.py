# ruff: noqa
#: case flag in another file that is false here
from plug.flags import IS_OLD

if IS_OLD:
    from vllm.attention.layer import Attention
#: file flags.py
import vllm
from packaging.version import Version

IS_OLD = Version(vllm.__version__) < Version("0.10")

#: case flag in another file that is true here
from plug import flags

if flags.IS_NEW:
    from vllm.attention.layer import Attention  # expect: BP101
else:
    from vllm.attention.ops import Attention
#: file flags.py
import vllm
from packaging.version import Version

IS_NEW = Version(vllm.__version__) >= Version("0.10")

#: case flag through a re-export
from plug.api import OLD

if OLD:
    from vllm.attention.layer import Attention
#: file api.py
from plug.flags import IS_OLD as OLD

#: file flags.py
from packaging.version import Version
from vllm import __version__

IS_OLD = Version(__version__) < Version("0.10")

#: case flag in another file that cannot be worked out
from plug.flags import IS_OLD

if IS_OLD:
    from vllm.attention.layer import Attention  # expect: BP101 note
#: file flags.py
import vllm
from plug.more import compared

IS_OLD = compared(vllm.__version__)

#: case helper in the same file
import vllm
from packaging.version import Version


def is_old():
    """Whether."""
    return Version(vllm.__version__) < Version("0.10")


if is_old():
    from vllm.attention.layer import Attention
if not is_old():
    from vllm.attention.ops import Attention  # expect: BP101

#: case helper that takes the version
from packaging.version import Version


def before(version):
    from vllm import __version__

    return Version(__version__) < Version(version)


if before("0.10"):
    from vllm.attention.layer import Attention
if before("99"):
    from vllm.attention.ops import Attention  # expect: BP101

#: case helper in another file
from plug.flags import is_old

if is_old():
    from vllm.attention.layer import Attention
else:
    from vllm.attention.ops import Attention  # expect: BP101
#: file flags.py
from functools import cache


@cache
def is_old():
    import vllm
    from packaging.version import Version

    return Version(vllm.__version__) < Version("0.10")


#: case helper in another file that cannot be worked out
from plug.flags import is_old

if is_old():
    from vllm.attention.layer import Attention  # expect: BP101 note


#: file flags.py
def is_old():
    for line in open("version"):
        if line.startswith("0.9"):
            return True


#: case a helper that asks itself
def is_old():
    return is_old()


if is_old():
    from vllm.attention.layer import Attention  # expect: BP101

#: case Python that vLLM does not run on
import sys

if sys.version_info < (3, 8):
    from vllm.attention.layer import Attention
if sys.version_info >= (3, 8):
    from vllm.attention.ops import Attention  # expect: BP101

#: case another platform
from vllm.platforms import current_platform

if current_platform.is_cuda():
    from vllm.attention.layer import Attention  # expect: BP101 note

#: case what every module and class has
import vllm.config
from vllm.config import VllmConfig

NAMES = list(vllm.config.__dict__)
KIND = vllm.config.__class__
DOC = VllmConfig.__dict__

#: case a variable that the plugin declares to vLLM and reads from it
from vllm import envs

envs.environment_variables["VLLM_PLUG_SOMETHING"] = lambda: 1
VALUE = envs.VLLM_PLUG_SOMETHING
OTHER = envs.VLLM_PLUG_OTHER  # expect: BP601

#: case variables merged into the environment
import os

os.environ |= {"VLLM_NO_SUCH_THING": "1"}  # expect: BP601

#: case variables merged into the environment, computed
import os
from plug.more import settings

os.environ |= settings  # expect: BP901 note

#: case variables merged into vLLM's own table
from vllm import envs

envs.environment_variables |= {"VLLM_PLUG_SOMETHING": lambda: 1}
VALUE = envs.VLLM_PLUG_SOMETHING

#: case set through a namespace
import vllm.config
from vllm.v1.core.sched import scheduler

vars(vllm.config)["no_such_name"] = 1  # expect: BP201
scheduler.__dict__["no_such_name"] = 1  # expect: BP201
vars(scheduler)["Scheduler"] = None

#: case set through a namespace, computed
import vllm.config
from plug.more import name

vars(vllm.config)[name()] = 1  # expect: BP901 note

#: case set around setattr
from vllm.v1.core.sched.scheduler import Scheduler

type.__setattr__(Scheduler, "no_such_method", None)  # expect: BP201
type.__setattr__(Scheduler, "schedule", None)

#: case set on a parameter that is of vLLM unless given
from vllm.v1.core.sched.scheduler import Scheduler


def patch(cls=Scheduler, *, other=Scheduler):
    cls.no_such_method = None  # expect: BP901 note
    other.no_such_method = None  # expect: BP901 note


#: case set on what a function returns
from vllm.v1.core.sched.scheduler import Scheduler


def get():
    return Scheduler


get().no_such_method = None  # expect: BP201
get().schedule = None

#: case set on an element of a list
from vllm.v1.core.sched.scheduler import Scheduler

[Scheduler][0].no_such_method = None  # expect: BP201
{"a": Scheduler}["a"].no_such_method = None  # expect: BP201
