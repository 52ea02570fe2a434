# ruff: noqa
#: case enumeration member that went
from vllm.platforms import PlatformEnum

KIND = PlatformEnum.NPU  # expect: BP103

#: case enumeration members and methods that are there
from vllm.platforms import PlatformEnum
from vllm.v1.request import RequestStatus

KIND = PlatformEnum.OOT
NAMES = [member.name for member in PlatformEnum]
MAP = PlatformEnum.__members__
VALUE = PlatformEnum.OOT.value
DONE = RequestStatus.is_finished(RequestStatus.RUNNING)

#: case attribute of a module
import vllm

LIMIT = vllm.utils.math_utils.cdiv(3, 2)
OTHER = vllm.utils.cdiv(3, 2)  # expect: BP103

#: case chain through a module that went
import vllm


def layer():
    return vllm.attention.layer.Attention  # expect: BP103


#: case reported once at the import
import vllm.attention.layer as layer  # expect: BP101
from vllm.worker.worker import Worker  # expect: BP101

Attention = layer.Attention
Worker.execute_model = None


class Mine(Worker):
    def run(self):
        return super().run()


#: case class method of a class
from vllm.platforms import Platform

NAME = Platform.get_device_name(0)
KIND = Platform.is_out_of_tree

#: case attribute of a class that went
from vllm.v1.core.sched.scheduler import Scheduler

FUNCTION = Scheduler.schedule
GONE = Scheduler.schedule_prefills  # expect: BP103

#: case instances are not followed
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

config = get_current_vllm_config()
PATH = config.some_new_field.other
NAME = current_platform.anything_goes

#: case dataclass machinery
from vllm.v1.outputs import ModelRunnerOutput

FIELDS = ModelRunnerOutput.__dataclass_fields__
DOC = ModelRunnerOutput.__doc__

#: case member added by a registration
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

register_backend("PLUG_ATTN", "plug.case.Backend")


class Backend:
    pass


NAME = AttentionBackendEnum.PLUG_ATTN

#: case member replaced by registration
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

register_backend(AttentionBackendEnum.CUSTOM, "plug.case.Backend")
register_backend(AttentionBackendEnum.PAGED_ATTENTION, "plug.case.Backend")  # expect: BP103


class Backend:
    pass


#: case names shadowed by a parameter
import vllm.utils as utils


def size(utils):
    return utils.cdiv(3, 2)


#: case name bound again
import vllm.utils as helper

helper = object()
VALUE = helper.cdiv


#: case dotted path to a class that went
class Platform:
    @classmethod
    def get_punica_wrapper(cls):
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

    @classmethod
    def check_and_update_config(cls, config):
        config.parallel_config.worker_cls = "vllm.worker.worker.Worker"  # expect: BP104


#: case strings that only look like paths
import logging

LOG = logging.getLogger("vllm.worker.Old")
MESSAGE = "vllm.worker.worker.Worker is gone"
NAME = "vllm.logger"
VERSION = "vllm.0.32"


def check(name):
    return name == "vllm.worker.worker.Worker"


#: case annotation that runs
import vllm.sequence as sequence


def run(group: sequence.SequenceGroup):  # expect: BP103
    return group


#: case annotation that does not run
from __future__ import annotations

import vllm.sequence as sequence


def run(group: sequence.SequenceGroup) -> sequence.Other:
    return group


#: case attribute set by the plugin before
import vllm.utils

vllm.utils.plug_helper = print  # expect: BP201 note


def use(module):
    vllm.utils.plug_helper("x")
    return module.plug_helper
