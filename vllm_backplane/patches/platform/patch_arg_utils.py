"""Records explicit engine arguments before vLLM fills in defaults, because a platform cannot distinguish the two.

Features of the V2 model runner are refused here as well, because vLLM refuses one of them, HiSparse, before it calls a
platform, with advice that is wrong here.
"""

from __future__ import annotations

from typing import Any

from vllm_backplane.settings.explicit_arguments import record
from vllm_patchbay.patch import Patch, Process

_SOURCE = (
    "f8bed10cea3b0f62 ca23 043f d636 02fd 160f 89ea b501 3105 0165 6a8f 1d1e e2ca a1a1 fb47 4f5a 44ce"
    " 812b 4fcc e896 8254"
)


@Patch(
    target="vllm.engine.arg_utils:EngineArgs._set_default_chunked_prefill_and_prefix_caching_args",
    process=Process.PLATFORM,
    versions=">=0.30,<0.34",
    why="vLLM turns prefix caching and async scheduling on by default, and passes the configuration to a platform only "
    "afterwards. A platform without these features could neither refuse an explicit argument nor turn a default off. "
    "Its hooks receive the parser of a command line, but no arguments that are given in Python. vLLM also refuses "
    "HiSparse before it calls a platform, with the advice to remove VLLM_USE_V2_MODEL_RUNNER=0, which Backplane sets "
    "on a device without Triton, and not the user.",
    how="Records which of the two were given explicitly, before any default is filled in, and refuses features that "
    "need Triton by the name of their option. Everything else is unchanged.",
    upstream="https://github.com/vllm-project/vllm/issues/48283",
    remove_when="vLLM gets its defaults from the platform, or passes it the explicit arguments.",
    faulty_while=(
        "vllm.engine.arg_utils:EngineArgs._set_default_chunked_prefill_and_prefix_caching_args",
        "default_prefix_caching = model_config.is_prefix_caching_supported\n",
    ),
    fingerprints={"0.30.0": _SOURCE, "0.31.0": _SOURCE, "0.32.0": _SOURCE, "0.33.0": _SOURCE},
)
def _set_default_chunked_prefill_and_prefix_caching_args(self: Any, model_config: Any) -> None:
    # Imported here, because they import torch, and the command that checks patches does not.
    from vllm_backplane.device.triton_features import refuse_features_that_need_triton
    from vllm_backplane.runtime import runtime

    record(self)
    refuse_features_that_need_triton(self, runtime().device)
    _set_default_chunked_prefill_and_prefix_caching_args.original(self, model_config)
