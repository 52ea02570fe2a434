"""Refuses features that need Triton, on a device that has none.

They need vLLM's V2 model runner, which needs Triton. The check is needed before and while vLLM makes its configuration,
by a patch and by the platform. It reads attributes that the engine's arguments and the configuration have in common.
"""

from __future__ import annotations

from typing import Any

from vllm_backplane.device.contract import Device
from vllm_backplane.errors import BackplaneError


def refuse_features_that_need_triton(config: Any, device: Device) -> None:
    """Raises for features that need vLLM's V2 model runner whatever VLLM_USE_V2_MODEL_RUNNER is, on a device that
    cannot run it. `config` is vLLM's configuration, or the arguments that it is made from."""
    if device.capabilities.triton:
        return
    features = (
        ("HiSparse attention", "hisparse_config from --attention-config", config.attention_config, "hisparse_config"),
        ("watermarking", "--watermark-config", config, "watermark_config"),
    )
    for feature, option, part, name in features:
        if getattr(part, name, None) is not None:  # not every supported release has both
            raise BackplaneError(
                f"{feature} needs vLLM's V2 model runner, which needs Triton, and device {device.name!r} has no "
                f"Triton; remove {option}"
            )
