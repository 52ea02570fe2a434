# ruff: noqa
#: case for type checkers, and gone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.sequence import SequenceGroup  # expect: BP102 note

#: case for type checkers, and there for them
from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import GPUModelRunner
    from vllm.config import VllmConfig

#: case else of type checking runs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
else:
    from vllm.config import CompilationLevel as VllmConfig  # expect: BP102

#: case new place first, old place in the handler
try:
    from vllm.utils.math_utils import cdiv
except ImportError:
    from vllm.utils import cdiv

#: case old place first, new place in the handler
try:
    from vllm.utils import cdiv
except ImportError:
    from vllm.utils.math_utils import cdiv

#: case no place is left
try:
    from vllm.attention.layer import Attention
except ImportError:
    from vllm.attention import Attention  # expect: BP101

#: case chain of places, the last is right
try:
    from vllm.attention.backends.abstract import AttentionBackend
except ImportError:
    try:
        from vllm.attention.abstract import AttentionBackend
    except ImportError:
        from vllm.v1.attention.backend import AttentionBackend

#: case goes without
try:
    from vllm.sequence import SequenceGroup  # expect: BP102 note
except ImportError:
    SequenceGroup = None

#: case goes without, with a flag
try:
    import vllm.attention.ops.paged_attn as paged  # expect: BP101 note

    HAS_PAGED = True
except ImportError:
    HAS_PAGED = False

if HAS_PAGED:
    from vllm.attention.ops.other import thing

#: case handler raises again
try:
    from vllm.worker.worker import Worker  # expect: BP101
except ImportError as fault:
    raise RuntimeError("this plugin needs another vLLM") from fault

#: case wrong exception is caught
try:
    from vllm.utils import cdiv  # expect: BP102
except ModuleNotFoundError:
    from vllm.utils.math_utils import cdiv

#: case missing module is a ModuleNotFoundError
try:
    from vllm.attention import Attention
except ModuleNotFoundError:
    from vllm.v1.attention.backend import AttentionBackend as Attention

#: case unrelated exception is caught
try:
    from vllm.sequence import SequenceGroup  # expect: BP102
except ValueError:
    SequenceGroup = None

#: case suppress
import contextlib

with contextlib.suppress(ImportError):
    from vllm.worker.worker import Worker  # expect: BP101 note

#: case helper says another version
from plug.versions import vllm_version_is

if vllm_version_is("0.10.0"):
    from vllm.attention.layer import Attention
else:
    from vllm.v1.attention.backend import AttentionBackend as Attention

#: case helper says this version
from plug.versions import vllm_version_is

if vllm_version_is("0.33.0"):
    from vllm.attention.layer import Attention  # expect: BP101
else:
    from vllm.nowhere import Attention

#: case version object, older branch
import vllm
from packaging.version import Version

if Version(vllm.__version__) < Version("0.20.0"):
    from vllm.utils import cdiv
else:
    from vllm.utils.math_utils import cdiv

#: case version object, newer branch is wrong
import vllm
from packaging import version

if version.parse(vllm.__version__) >= version.parse("0.20.0"):
    from vllm.utils import cdiv  # expect: BP102

#: case version kept in a name
from packaging.version import Version
from vllm import __version__ as VLLM_VERSION

IS_OLD = Version(VLLM_VERSION) < Version("0.11")

if IS_OLD:
    from vllm.worker.worker import Worker

#: case version tuple
from vllm.version import __version_tuple__

if __version_tuple__ < (0, 12):
    from vllm.worker.worker import Worker

#: case first two numbers
import vllm

if vllm.__version_tuple__[:2] == (0, 11):
    from vllm.worker.worker import Worker
elif vllm.__version_tuple__[:2] >= (0, 32):
    from vllm.attention.layer import Attention  # expect: BP101

#: case version prefix
import vllm

if vllm.__version__.startswith("0.9"):
    from vllm.worker.worker import Worker

#: case one of several versions
import vllm

if vllm.__version__ in ("0.10.1", "0.10.2"):
    from vllm.worker.worker import Worker

#: case installed metadata
from importlib.metadata import version

from packaging.version import parse

if parse(version("vllm")) < parse("0.15"):
    from vllm.worker.worker import Worker

#: case early return
import vllm
from packaging.version import Version


def apply():
    if Version(vllm.__version__) >= Version("0.15"):
        return
    from vllm.worker.worker import Worker

    Worker.execute_model = None


#: case early return under the opposite
import vllm
from packaging.version import Version


def apply():
    if Version(vllm.__version__) < Version("0.15"):
        return
    from vllm.worker.worker import Worker  # expect: BP101


#: case hasattr on a module
import vllm.config as config

if hasattr(config, "CompilationLevel"):
    LEVEL = config.CompilationLevel.PIECEWISE
else:
    LEVEL = config.CompilationMode.VLLM_COMPILE

#: case hasattr in an expression
import vllm.config as config

LEVEL = config.CompilationLevel if hasattr(config, "CompilationLevel") else config.CompilationMode

#: case hasattr and use in one condition
import vllm.utils

if hasattr(vllm.utils, "cdiv") and vllm.utils.cdiv(3, 2) == 2:
    pass

#: case getattr with a default
import vllm.config

LEVEL = getattr(vllm.config, "CompilationLevel", None)
if LEVEL is not None:
    PIECEWISE = LEVEL.PIECEWISE

#: case getattr without a default
import vllm.config

LEVEL = getattr(vllm.config, "CompilationLevel")  # expect: BP103

#: case find_spec
import importlib.util

if importlib.util.find_spec("vllm.attention") is not None:
    from vllm.attention.layer import Attention

#: case guard that is not understood
from plug.compat import VERSION_IS_OLD

if VERSION_IS_OLD:
    from vllm.worker.worker import Worker  # expect: BP101 note


#: case ordinary condition is no guard
def build(config):
    if config.use_old:
        from vllm.worker.worker import Worker  # expect: BP101

        return Worker
    return None


#: case attribute error is caught
import vllm.config

try:
    LEVEL = vllm.config.CompilationLevel.PIECEWISE  # expect: BP103 note
except AttributeError:
    LEVEL = None

#: case a test expects the failure
import pytest


def test_old_place_is_gone():
    with pytest.raises(ImportError):
        from vllm.worker.worker import Worker


#: case flag from a failed import, used later
try:
    from vllm.v1.attention.backend import AttentionBackend

    NEW = True
except ImportError:
    NEW = False

if not NEW:
    from vllm.attention.backends.abstract import AttentionBackend
