"""Implements attention whose metadata a vendor's own class builds, as an extension that a worker loads.

The metadata has a number of the step beside views of buffers, so it differs from step to step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm_backplane.attention import selection
from vllm_backplane.attention.backend import BackplaneAttentionBackend
from vllm_backplane.attention.metadata import BackplaneAttentionMetadata, BackplaneMetadataBuilder


@dataclasses.dataclass(slots=True)
class VendorMetadata(BackplaneAttentionMetadata):
    longest: int = 0


class VendorBuilder(BackplaneMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> VendorMetadata:
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        fields = {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}
        return VendorMetadata(**fields, longest=common_attn_metadata.max_seq_len)


class VendorBackend(BackplaneAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[VendorBuilder]:
        return VendorBuilder


class Extension:
    """Adds nothing to the worker; its module is what is loaded."""


selection.BACKEND = f"{__name__}.VendorBackend"
