# ruff: noqa
#: case name that no class has
from vllm.model_executor.custom_op import CustomOp


@CustomOp.register_oot(name="RMSNormalisation")  # expect: BP301
class PlugNorm:
    pass


#: case name of a layer
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm


@CustomOp.register_oot(name="RMSNorm")
class PlugNorm(RMSNorm):
    def forward_oot(self, x, residual=None):
        return x


#: case registered on the class itself
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm


@RMSNorm.register_oot
class PlugNorm(RMSNorm):
    pass


@SiluAndMul.register_oot()
class PlugSilu(SiluAndMul):
    pass


#: case registered for the base class by mistake
from vllm.model_executor.custom_op import CustomOp


@CustomOp.register_oot  # expect: BP301
class PlugOp:
    pass


#: case table of layers
from vllm.model_executor.custom_op import CustomOp

from plug import ops

REGISTERED = {
    "RMSNorm": ops.Norm,
    "SiluAndMul": ops.Silu,
    "QuickGELU": ops.Gelu,
    "FatrelUAndMul": ops.Fatrelu,  # expect: BP301
    "ColumnParallelLinear": ops.Column,
}


def register():
    for name, cls in REGISTERED.items():
        CustomOp.register_oot(_decorated_op_cls=cls, name=name)


#: case list of pairs
from vllm.model_executor.custom_op import CustomOp

from plug import ops

for name, cls in [("RMSNorm", ops.Norm), ("RMSNorms", ops.Norms)]:  # expect: BP301
    CustomOp.register_oot(_decorated_op_cls=cls, name=name)

#: case name computed
from vllm.model_executor.custom_op import CustomOp


def register(cls):
    CustomOp.register_oot(_decorated_op_cls=cls, name=cls.__name__.removeprefix("Plug"))  # expect: BP901 note


#: case class that never asks for replacements
from vllm.model_executor.custom_op import CustomOp


@CustomOp.register_oot(name="GPUModelRunner")  # expect: BP301
class PlugRunner:
    pass


#: case pluggable layer
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.linear import RowParallelLinear


@PluggableLayer.register_oot(name="RowParallelLinear")
class PlugRow(RowParallelLinear):
    pass


@PluggableLayer.register_oot(name="RowParallelLinears")  # expect: BP301
class PlugRows(RowParallelLinear):
    pass


#: case another registry with the same method
from plug.registry import Registry


@Registry.register_oot(name="Anything")
class Mine:
    pass


#: case kernels by path
from vllm.triton_utils.dispatcher import register_kernels

from plug import kernels

register_kernels(
    {
        "vllm.v1.sample.rejection_sampler.expand_kernel": kernels.expand,
        "vllm.v1.sample.rejection_sampler.expand_batch_kernel": kernels.batch,  # expect: BP301
        "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": kernels.slots,
    }
)

#: case kernels wrapped one by one
from plug import kernels
from plug.compatibility import register_kernels

TABLE = {
    "vllm.v1.sample.rejection_sampler.expand_kernel": kernels.expand,
    "vllm.v1.sample.rejection_sampler.expand_batch_kernel": kernels.batch,  # expect: BP301
}

register_kernels({name: kernels.wrapped(kernel) for name, kernel in TABLE.items()})

#: case some kernels of a table
from vllm.triton_utils.dispatcher import register_kernels

from plug import kernels

TABLE = {
    "vllm.v1.sample.rejection_sampler.expand_batch_kernel": kernels.batch,
}

register_kernels({name: kernel for name, kernel in TABLE.items() if kernels.needed(name)})  # expect: BP901 note

#: case connector in the plugin
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

KVConnectorFactory.register_connector("PlugConnector", "plug.connector", "PlugConnector")
KVConnectorFactory.register_connector("OtherConnector", "plug.connector", "OtherConnector")  # expect: BP302


#: file connector.py
class PlugConnector:
    pass


#: case model in the plugin
from vllm import ModelRegistry

ModelRegistry.register_model("PlugForCausalLM", "plug.model:PlugForCausalLM")
ModelRegistry.register_model("OtherForCausalLM", "plug.models:OtherForCausalLM")  # expect: BP302


#: file model.py
class PlugForCausalLM:
    pass


#: case class path made from the module's name
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")


class Backend:
    pass


#: case method of an owner that could not be imported
try:
    from vllm.model_executor.custom_ops import CustomOp
except ImportError:
    from vllm.model_executor.custom_op import CustomOp


@CustomOp.register_oot(name="RMSNorm")
class PlugNorm:
    pass
