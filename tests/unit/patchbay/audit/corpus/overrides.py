# ruff: noqa
#: case required argument that upstream does not pass
from vllm.v1.worker.gpu_worker import Worker


class PlugWorker(Worker):
    def execute_model(self, scheduler_output, intermediate_tensors):  # expect: BP401
        return None


#: case argument that upstream passes
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    def update_from_output(self, scheduler_output):  # expect: BP401
        return {}


#: case optional argument is not accepted
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    def schedule(self):  # expect: BP401
        return None


#: case keyword argument is not accepted
from vllm.v1.worker.gpu_worker import Worker


class PlugWorker(Worker):
    def load_model(self):  # expect: BP401
        return None


#: case everything is accepted
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_worker import Worker


class PlugWorker(Worker):
    def __init__(self, config, extra):
        super().__init__(config, 0, 0, "")

    def execute_model(self, scheduler_output, *, traced=False):
        return super().execute_model(scheduler_output)

    def load_model(self, *args, **kwargs):
        super().load_model(*args, **kwargs)

    def entirely_new(self, a, b):
        return a + b


class PlugScheduler(Scheduler):
    def schedule(self, throttle_prefills: bool = False, trace: bool = True):
        return super().schedule(throttle_prefills)


#: case arguments by name, and vLLM passes them by name
from vllm.v1.attention.backend import AttentionMetadataBuilder


class Builder(AttentionMetadataBuilder):
    def build(self, prefix_len, metadata, fast_build=False):  # expect: BP401
        return None


#: case class methods of a platform
from vllm.platforms import Platform


class PlugPlatform(Platform):
    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "plug"

    @classmethod
    def check_and_update_config(cls, vllm_config, parser):  # expect: BP401
        return None

    @staticmethod
    def is_pin_memory_available():
        return False


#: case property against method
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    @property
    def get_num_unfinished_requests(self):  # expect: BP401
        return 0


#: case async against plain
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    async def add_request(self, request):  # expect: BP401
        return None


#: case through a class of the plugin
from plug.base import Base


class PlugWorker(Base):
    def execute_model(self, scheduler_output, tensors):  # expect: BP401
        return None


#: file base.py
from vllm.v1.worker.gpu_worker import Worker


class Base(Worker):
    def extra(self):
        return 1


#: case the plugin's own method in between
from plug.base import Base


class PlugWorker(Base):
    def execute_model(self, scheduler_output, tensors=None, more=None):
        return None


#: file base.py
from vllm.v1.worker.gpu_worker import Worker


class Base(Worker):
    def execute_model(self, scheduler_output, tensors=None):
        return None


#: case layers dispatch to any signature
from vllm.model_executor.custom_op import CustomOp


class PlugOp(CustomOp):
    def forward_native(self, x, weight, bias):
        return x

    def forward_oot(self, x, weight, bias):
        return x


#: case marked as override of nothing
from typing import override

from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    @override
    def schedule(self, throttle_prefills=False):
        return None

    @override
    def plan(self):  # expect: BP402
        return None


#: case super has no such method
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Scheduler):
    def plan(self):
        return super().plan()  # expect: BP403

    def schedule(self, throttle_prefills=False):
        return super().schedule(throttle_prefills)


#: case super through a mixin and an unknown base
from somewhere import Unknown
from vllm.v1.core.sched.scheduler import Scheduler


class PlugScheduler(Unknown, Scheduler):
    def plan(self):
        return super().plan()


#: case class of the same name elsewhere
class Scheduler:
    def schedule(self):
        return 1


class PlugScheduler(Scheduler):
    def schedule(self, a, b, c):
        return super().plan()


#: case class made in a function
def make():
    from vllm.v1.core.sched.scheduler import Scheduler

    class Made(Scheduler):
        def update_from_output(self):  # expect: BP401
            return None

    return Made


#: case abstract base with everything optional
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class PlugCommunicator(DeviceCommunicatorBase):
    def all_reduce(self, input_):
        return input_

    def all_gather(self, input_, dim: int = -1):
        return input_
