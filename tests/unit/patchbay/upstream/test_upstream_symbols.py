"""Tests the resolution of names: a small tree for each rule, and the real vLLM compared with its imported modules."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from tests import programs
from vllm_patchbay.upstream import SourceError, SymbolIndex, fingerprint, normalized_source, open_tree


@pytest.fixture
def index(tmp_path):
    def make(**modules: str) -> SymbolIndex:
        for name, source in {"__init__": "", **modules}.items():
            path = tmp_path / "vllm" / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return SymbolIndex(open_tree(f"1.0@{tmp_path}"))

    return make


def outcome(index: SymbolIndex, path: str) -> str:
    module, _, qualname = path.partition(":")
    return str(index.resolve(module, qualname).outcome)


def test_reexports_are_followed_to_the_definition(index):
    found = index(
        __init__="from vllm.api import Thing as Other\n",
        api="from .impl import Thing\nfrom . import impl as module\nAlias = Thing\n",
        impl="class Thing:\n    def run(self, x): ...\n",
    )
    assert found.resolve("vllm", "Other").path == "vllm.impl:Thing"
    assert found.resolve("vllm.api", "Alias.run").path == "vllm.impl:Thing.run"
    assert found.resolve("vllm.api", "module.Thing.run").path == "vllm.impl:Thing.run"
    assert found.resolve_path("vllm.api.Thing.run").path == "vllm.impl:Thing.run"
    assert outcome(found, "vllm.api:Nothing") == "missing"
    assert outcome(found, "vllm.nowhere:Thing") == "missing"


def test_circular_reexports_end(index):
    found = index(a="from vllm.b import X\n", b="from vllm.a import X\n")
    assert outcome(found, "vllm.a:X") in ("found", "unknown")
    found = index(a="from vllm.b import *\n", b="from vllm.a import *\n")
    assert outcome(found, "vllm.a:Y") in ("missing", "unknown")


def test_a_name_for_type_checkers_is_not_there(index):
    found = index(
        a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.b import B\nelse:\n    C = 1\n",
        b="class B: ...\n",
    )
    assert outcome(found, "vllm.a:B") == "missing"
    assert "type checkers" in found.resolve("vllm.a", "B").reason
    assert outcome(found, "vllm.a:C") == "found"


def test_star_imports(index):
    found = index(
        a="from vllm.b import *\nfrom vllm.c import *\n",
        b="X = 1\n_hidden = 2\n",
        c="__all__ = ['Y']\nY = 1\nZ = 2\n",
        d="from numpy import *\n",
    )
    assert outcome(found, "vllm.a:X") == "found"
    assert outcome(found, "vllm.a:Y") == "found"
    assert outcome(found, "vllm.a:Z") == "missing"
    assert outcome(found, "vllm.a:_hidden") == "missing"
    assert outcome(found, "vllm.d:anything") == "unknown"


def test_star_imports_of_star_imports(index):
    found = index(
        a="from vllm.b import *\n",
        b="from vllm.c import *\nfrom vllm.d import *\n",
        c="__all__ = ['X', 'Lost']\nfrom vllm.e import *\n",
        d="from vllm.a import *\nW = 1\n",
        e="X = 1\nY = 2\n",
        f="from vllm.g import *\n",
        g="from vllm.nowhere import *\nfrom numpy import *\n",
    )
    assert found.resolve("vllm.a", "X").path == "vllm.e:X"
    assert found.resolve("vllm.a", "W").path == "vllm.d:W"
    assert outcome(found, "vllm.a:Y") == "missing"  # c does not pass it on
    assert outcome(found, "vllm.a:Lost") == "missing"
    assert outcome(found, "vllm.f:anything") == "unknown"


def test_many_modules_that_import_everything_of_each_other(index):
    """Following every path through them would never end. This is no measurement."""
    names = [f"m{number}" for number in range(40)]
    text = "".join(f"from vllm.{name} import *\n" for name in names)
    found = index(**{name: f"{text}OF_{name.upper()} = 1\n" for name in names})
    assert found.resolve("vllm.m0", "OF_M39").path == "vllm.m39:OF_M39"
    assert found.resolve("vllm.m39", "OF_M0").path == "vllm.m0:OF_M0"
    assert outcome(found, "vllm.m7:nothing") == "missing"


LAZY = {
    "table": "N = {'A': 1}\ndef __getattr__(name):\n    if name in N:\n        return 1\n    raise AttributeError\n",
    "compared": "def __getattr__(name):\n    if name == 'A':\n        return 1\n    raise AttributeError(name)\n",
    "gotten": (
        "N = {'A': 1}\ndef __getattr__(name):\n    found = N.get(name)\n    if found is None:\n"
        "        raise AttributeError(name)\n    return found\n"
    ),
    "globals": "def __getattr__(name):\n    if name in ['A']: return 1\n    raise AttributeError(name)\n",
}
OPEN = {
    "delegates": "import x\ndef __getattr__(name):\n    return getattr(x, name)\n",
    "computed": "N = make()\ndef __getattr__(name):\n    if name in N:\n        return 1\n    raise AttributeError\n",
    "grows": "N = {'A': 1}\nN |= f()\ndef __getattr__(name):\n    if name in N: return 1\n    raise AttributeError\n",
}


@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_module_that_knows_its_names(index, kind):
    found = index(a=LAZY[kind])
    assert (outcome(found, "vllm.a:A"), outcome(found, "vllm.a:B")) == ("found", "missing")


@pytest.mark.parametrize("kind", OPEN)
def test_a_lazy_module_that_may_answer_for_any_name(index, kind):
    assert outcome(index(a=OPEN[kind]), "vllm.a:B") == "unknown"


def test_members_are_inherited_in_pythons_order(index):
    source = (
        "class Root:\n    def f(self): ...\n    def g(self): ...\n"
        "class Left(Root):\n    def f(self): ...\n"
        "class Right(Root):\n    def f(self): ...\n    def g(self): ...\n"
        "class Both(Left, Right):\n    def __init__(self):\n        self.made = 1\n    limit: int = 3\n    late: str\n"
    )
    found = index(a=source)
    scope: dict[str, type] = {}
    exec(source, scope)
    expected = [cls.__name__ for cls in scope["Both"].__mro__[:-1]]
    line = found.ancestors("vllm.a", "Both")
    assert [name for _, name, _ in line.classes] == expected
    assert found.resolve("vllm.a", "Both.g").qualname == "Right.g"
    for name in ("made", "limit", "late", "f", "__init__", "__doc__", "mro"):
        assert outcome(found, f"vllm.a:Both.{name}") == "found", name
    assert outcome(found, "vllm.a:Both.h") == "missing"


def test_a_base_outside_the_tree_makes_lookups_unknown(index):
    found = index(
        a=(
            "import abc, enum, torch\nfrom typing import Generic, Protocol, TypeVar\nT = TypeVar('T')\n"
            "class Layer(torch.nn.Module):\n    def f(self): ...\n"
            "class Sub(Layer): ...\n"
            "class Plain(abc.ABC, Generic[T]): ...\n"
            "class Kind(enum.Enum):\n    A = 1\n"
            "class Fault(ValueError): ...\n"
            "class Any:\n    def __getattr__(self, name): ...\n"
            "class Made(make()): ...\n"
        )
    )
    assert outcome(found, "vllm.a:Sub.f") == "found"
    assert outcome(found, "vllm.a:Sub.g") == "unknown"
    assert outcome(found, "vllm.a:Plain.g") == "missing"
    assert outcome(found, "vllm.a:Kind.A") == "found"
    assert outcome(found, "vllm.a:Kind.__members__") == "found"
    assert outcome(found, "vllm.a:Kind.name") == "found"
    assert outcome(found, "vllm.a:Kind.B") == "missing"
    assert outcome(found, "vllm.a:Fault.with_traceback") == "found"
    assert outcome(found, "vllm.a:Fault.g") == "missing"
    assert outcome(found, "vllm.a:Any.g") == "unknown"
    assert outcome(found, "vllm.a:Made.g") == "unknown"


def test_definitions_in_branches(index):
    found = index(
        a="try:\n    import fast\n    def f(x): return 1\nexcept ImportError:\n    def f(x): return 2\n"
        "for n in (1,):\n    K = n\n"
    )
    text = found.source_of("vllm.a", "f")
    assert "return 1" in text and "return 2" in text
    assert outcome(found, "vllm.a:K") == "found"


def test_a_module_that_cannot_be_parsed_is_unknown(index):
    found = index(a="def broken(:\n", b="from vllm.a import X\n")
    assert outcome(found, "vllm.a:X") == "unknown"
    assert "cannot be parsed" in found.resolve("vllm.a", "X").reason
    assert outcome(found, "vllm.b:X") == "found"


def test_source_of_what_is_not_there(index):
    found = index(a="X = 1\n")
    with pytest.raises(SourceError, match="missing"):
        found.source_of("vllm.a", "Y")
    with pytest.raises(SourceError, match="not a definition"):
        found.source_of("vllm.a", "__name__")


def test_the_fingerprint_ignores_layout_comments_and_docstrings():
    one = 'def f(x, y=1):\n    """Says."""\n    # why\n    return {"a": [x,\n        y]}\n'
    two = "def f(x, y = 1):\n    return {'a': [x, y]}   # because\n"
    assert fingerprint(one) == fingerprint(two) == fingerprint(normalized_source(one))
    assert len(fingerprint(one)) == 16
    for other in ("def f(x, y=2):\n    return {'a': [x, y]}\n", "def g(x, y=1):\n    return {'a': [x, y]}\n"):
        assert fingerprint(other) != fingerprint(one)


def test_the_fingerprint_of_a_method_is_that_of_its_text_anywhere(index):
    method = (
        '    @decorated\n    def f(self):\n        """Says."""\n        return f"""a\nb {self.x!r:>{self.w}} c"""\n'
    )
    found = index(a=f"class A:\n{method}\n")
    assert found.source_of("vllm.a", "A.f") == method
    assert found.fingerprint_of("vllm.a", "A.f") == fingerprint(method)
    changed = method.replace("a\nb", "a b")
    assert fingerprint(changed) != fingerprint(method)


def test_the_fingerprint_is_what_it_was_when_patches_were_written():
    """Fingerprints are compared for years: this one must not change under any version of Python."""
    source = (
        "@d(1)\nasync def f(a, /, b: int = 2, *c, e, **k) -> str:\n    x = [i async for i in g() if i]\n"
        '    return f"{a!r:>{b}} and {k}" \'tail\' + """text"""\n'
    )
    assert fingerprint(source) == "9e7a8148b9c95980"


PROGRAM = """
import importlib, inspect, json, sys, warnings
warnings.simplefilter("ignore")
result = {}
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    classes, signatures = {}, {}
    for key, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == name:
            classes[key] = sorted(k for c in value.__mro__ for k in vars(c) if c.__module__.startswith("vllm"))
        if inspect.isfunction(value) and value.__module__ == name and not hasattr(value, "__wrapped__"):
            signatures[key] = [[p.name, p.default is not p.empty] for p in inspect.signature(value).parameters.values()]
    result[name] = [sorted(vars(module)), classes, signatures]
print("RESULT" + json.dumps(result))
"""
MODULES = [
    "vllm", "vllm.config", "vllm.envs", "vllm.platforms", "vllm.platforms.interface", "vllm.logger", "vllm.utils",
    "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.output", "vllm.v1.request", "vllm.v1.kv_cache_interface",
    "vllm.v1.worker.worker_base", "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry",
    "vllm.v1.outputs", "vllm.v1.sample.sampler", "vllm.model_executor.custom_op", "vllm.forward_context",
    "vllm.model_executor.layers.layernorm", "vllm.model_executor.layers.linear", "vllm.distributed.parallel_state",
    "vllm.sampling_params", "vllm.v1.core.kv_cache_utils", "vllm.model_executor.layers.quantization.base_config",
]  # fmt: skip


@pytest.fixture(scope="module")
def imported():
    """Returns the names, classes and signatures of vLLM's modules, imported in a process of their own."""
    done = programs.run(programs.command(PROGRAM, json.dumps(MODULES)))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.partition("RESULT")[2])


@pytest.fixture(scope="module")
def real():
    return SymbolIndex(open_tree("installed"))


@pytest.mark.process
@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_vllm_has_is_called_missing(module, imported, real):
    names, classes, _ = imported[module]
    missing = [name for name in names if real.resolve(module, name).is_missing]
    # Submodules become attributes of their package when something imports them; dunders are Python's.
    assert [name for name in missing if not name.startswith("__")] == []
    for cls, members in classes.items():
        lost = [member for member in members if real.resolve(module, f"{cls}.{member}").is_missing]
        assert [member for member in lost if not member.startswith("_abc_")] == [], cls


@pytest.mark.process
@pytest.mark.parametrize("module", MODULES)
def test_what_vllm_does_not_have_is_never_found(module, imported, real):
    names, _, _ = imported[module]
    content = real.module(module)
    bound = {
        name
        for name, symbols in content.names.items()
        if not any(s.for_type_checkers or s.conditional or s.binds == "annotation" for s in symbols)
    }
    # Names that a module deletes again, or that its package replaces, would be here.
    assert sorted(bound - set(names)) == []
    assert real.resolve(module, "certainly_not_there").is_missing


@pytest.mark.process
@pytest.mark.parametrize("module", MODULES)
def test_signatures_are_those_of_the_functions(module, imported, real):
    for name, parameters in imported[module][2].items():
        found = real.signature_of(module, name)
        assert [[p.name, p.has_default] for p in found.parameters] == parameters, name


def test_source_is_what_inspect_reads(real):
    tree = open_tree("installed")
    for module, name in [
        ("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
        ("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests"),
        ("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks"),
        ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids"),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._dummy_run"),
        ("vllm.platforms.interface", "Platform"),
    ]:
        path = Path(tree.folder).parent / tree.file_of(module)  # type: ignore[attr-defined]
        lines = path.read_text().splitlines(keepends=True)
        symbol = real.resolve(module, name).symbol
        block = inspect.getblock(lines[symbol.line - 1 :])
        assert real.source_of(module, name) == "".join(block)
