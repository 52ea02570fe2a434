# ruff: noqa
#: case module of the first engine
from vllm.worker.worker import Worker  # expect: BP101

#: case old attention layer
from vllm.attention.layer import Attention  # expect: BP101

#: case plain import of a module that went
import vllm.model_executor.sampling_metadata  # expect: BP101

#: case aliased import of a module that went
import vllm.transformers_utils.tokenizer as tok  # expect: BP101


def load(name):
    return tok.get_tokenizer(name)


#: case helper moved to a submodule
from vllm.utils import cdiv, STR_DTYPE_TO_TORCH_DTYPE  # expect: BP102, BP102

#: case one of many names in parentheses
from vllm.config import (
    CacheConfig,
    CompilationLevel,  # expect: BP102
    VllmConfig,
)

#: case class that moved out of its module
from vllm.model_executor.layers.fused_moe.layer import FusedMoE  # expect: BP102

#: case name that upstream has for type checkers only
from vllm.v1.worker.gpu_worker import GPUModelRunner  # expect: BP102

#: case name that a lazy package does not know
from vllm import SequenceGroup  # expect: BP102


#: case import inside a function
def build():
    from vllm.sequence import SequenceGroup, IntermediateTensors  # expect: BP102

    return SequenceGroup, IntermediateTensors


#: case dynamic import by literal
import importlib

module = importlib.import_module("vllm.worker.model_runner")  # expect: BP101

#: case dynamic import computed
import importlib


def model(name):
    return importlib.import_module(f"vllm.model_executor.models.{name}")  # expect: BP901 note


#: case compiled module depends on the build
import vllm._C  # expect: BP901 note

#: case star import of a module that went
from vllm.attention.backends.abstract import *  # expect: BP101

#: case ordinary plugin imports
import torch
import vllm.envs as envs
from vllm import LLM, ModelRegistry, SamplingParams, __version__
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import Platform, PlatformEnum, current_platform
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

#: case submodule imported as a name
from vllm.model_executor import custom_op, layers
from vllm.v1 import worker

#: case lazy names
from vllm.envs import VLLM_PLUGINS, VLLM_CACHE_ROOT
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY

#: case another package whose name begins the same
import vllm_extra
from vllm_extra.worker import Gone
from vllmfork.attention import Attention

#: case relative imports of the plugin's own
from . import helper
from .worker import Anything
from .attention.layer import Attention

#: case names in strings and comments are not imports
TEXT = "from vllm.worker.worker import Worker"
# from vllm.attention import Attention
DOC = """
import vllm.model_executor.sampling_metadata
"""
