"""Implements a platform with just enough for the engine of vLLM to start and to schedule."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_patchbay.patch import PatchSession, PatchSet, Process

session = PatchSession.for_installed_vllm()
session.apply(PatchSet.of_package("foreign_npu.patches"), Process.PLATFORM)


class ForeignPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    supported_dtypes = [torch.float32]  # noqa: RUF012

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "foreign NPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 1 << 30

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("the worker computes no attention")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.parallel_config.worker_cls = "foreign_npu.worker.ForeignWorker"
        vllm_config.scheduler_config.async_scheduling = False
