"""Reads vLLM, or any other package, from its source, without importing it.

`open_tree` opens a source tree, `SymbolIndex` resolves names in it, and `fingerprint` shows whether a definition
changed. The modules of this folder import nothing of Patchbay but its cache folder and its errors.
"""

from vllm_patchbay.upstream.locate import cached_tree, installed_tree, open_tree, published_tree, version_of
from vllm_patchbay.upstream.normalized import fingerprint, normalized_source
from vllm_patchbay.upstream.signatures import Mismatch, Signature, mismatches
from vllm_patchbay.upstream.source import SourceError, SourceTree
from vllm_patchbay.upstream.symbols import Outcome, Resolution, SymbolIndex
from vllm_patchbay.upstream.versions import in_range, installed_version, is_beyond

__all__ = [
    "Mismatch",
    "Outcome",
    "Resolution",
    "Signature",
    "SourceError",
    "SourceTree",
    "SymbolIndex",
    "cached_tree",
    "fingerprint",
    "in_range",
    "installed_tree",
    "installed_version",
    "is_beyond",
    "mismatches",
    "normalized_source",
    "open_tree",
    "published_tree",
    "version_of",
]
