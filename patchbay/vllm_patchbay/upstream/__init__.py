"""Reading a vLLM, or any package, from its source alone, without importing it.

`open_tree` finds the source, `SymbolIndex` says what a name in it means, and `fingerprint` whether it changed.
"""

from vllm_patchbay.upstream.locate import installed_tree, kept_tree, open_tree, published_tree, version_of
from vllm_patchbay.upstream.normalized import fingerprint, normalised
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
    "fingerprint",
    "in_range",
    "installed_tree",
    "installed_version",
    "is_beyond",
    "kept_tree",
    "mismatches",
    "normalised",
    "open_tree",
    "published_tree",
    "version_of",
]
