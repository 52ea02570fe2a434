"""Tests the comparison of signatures against the result of real calls."""

from __future__ import annotations

import ast
import inspect
import itertools

import pytest

from vllm_patchbay.upstream.signatures import Fault, Signature, mismatches, signature_of_node

SHAPES = [
    "", "a", "a, b", "a, b=1", "a=1", "a=1, b=2", "b", "b, a", "*, a", "*, a=1", "a, *, b", "a, *, b=1", "*args",
    "**kwargs", "*args, **kwargs", "a, *args", "a, **kwargs", "a, /", "a, /, b", "a, b, /", "a=1, /", "a, *args, b",
    "a, *, b, **kwargs", "a, b=1, *args", "x", "a, x", "x, a", "a, b, c", "a, b, c=3", "*, b=1, a",
]  # fmt: skip


def parsed(shape: str) -> Signature:
    node = ast.parse(f"def f({shape}): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    return signature_of_node(node)


def real(shape: str) -> inspect.Signature:
    scope: dict[str, object] = {}
    exec(f"def f({shape}): pass", scope)
    return inspect.signature(scope["f"])  # type: ignore[arg-type]


def goes_astray(original: inspect.Signature, replacement: inspect.Signature, call: tuple[int, tuple[str, ...]]) -> bool:
    """Returns whether a call fails with the replacement, or passes another argument to a parameter of the same name."""
    count, names = call
    if not binds(replacement, count, names):
        return True
    keywords = {name: name for name in names}
    wanted, got = (
        original.bind(*range(count), **keywords).arguments,
        replacement.bind(*range(count), **keywords).arguments,
    )
    return any(
        name in replacement.parameters and got.get(name) != value
        for name, value in wanted.items()
        if original.parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and replacement.parameters.get(name, original.parameters[name]).kind is not inspect.Parameter.POSITIONAL_ONLY
    )


def binds(signature: inspect.Signature, count: int, names: tuple[str, ...]) -> bool:
    try:
        signature.bind(*range(count), **dict.fromkeys(names, 0))
    except TypeError:
        return False
    return True


# 'q' stands for any name that is not a parameter.
CALLS = [(count, names) for count in range(5) for size in range(4) for names in itertools.combinations("abcxq", size)]


@pytest.mark.slow
@pytest.mark.parametrize("original", SHAPES)
def test_a_mismatch_is_found_exactly_where_a_call_fails(original):
    """Every call that the original accepts is tried on the replacement."""
    for replacement in SHAPES:
        accepted = [call for call in CALLS if binds(real(original), *call)]
        failing = [call for call in accepted if goes_astray(real(original), real(replacement), call)]
        found = mismatches(parsed(original), parsed(replacement))
        if {"*args", "**kwargs"} <= {word.strip() for word in original.split(",")}:
            assert found == (), "(*args, **kwargs) is a placeholder for any signature"
            continue
        assert bool(found) == bool(failing), f"({original}) by ({replacement}): {found}, fails {failing[:3]}"


@pytest.mark.parametrize("original", SHAPES)
def test_certain_means_that_every_call_fails(original):
    for replacement in SHAPES:
        accepted = [call for call in CALLS if binds(real(original), *call)]
        found = mismatches(parsed(original), parsed(replacement))
        if any(mismatch.certain for mismatch in found):
            assert not any(binds(real(replacement), *call) for call in accepted), f"({original}) by ({replacement})"


def test_parameters_are_those_that_python_sees():
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional-only",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "normal",
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.KEYWORD_ONLY: "keyword-only",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    for shape in SHAPES:
        expected = [
            (p.name, kinds[p.kind], p.default is not inspect.Parameter.empty) for p in real(shape).parameters.values()
        ]
        assert [(p.name, p.kind, p.has_default) for p in parsed(shape).parameters] == expected


def test_text_of_a_signature():
    assert str(parsed("a, /, b=1, *args, c, d=2, **rest")) == "(a, /, b=…, *args, c, d=…, **rest)"
    assert str(parsed("self, *, x")) == "(self, *, x)"
    assert str(parsed("self, *, x").without_first()) == "(*, x)"


def function(source: str) -> Signature:
    node = ast.parse(source).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return signature_of_node(node)


def test_async_functions_and_generators():
    plain, waits = function("def f(): pass"), function("async def f(): return 1")
    stream = function("async def f():\n    yield 1")
    stub = function("async def f() -> AsyncGenerator[int, None]: ...")
    nested = function("async def f():\n    def g():\n        yield 1\n    return g")
    assert (plain.is_async, waits.is_async, stream.is_async, stub.is_async) == (False, True, False, False)
    assert nested.is_async
    assert mismatches(plain, waits)[0].certain
    assert not mismatches(waits, plain)[0].certain
    assert mismatches(plain, stream) == ()


def test_the_mismatches_name_what_fails():
    found = mismatches(parsed("a, b=1"), parsed("x"))
    assert [(m.fault, m.parameter) for m in found] == [(Fault.BY_NAME, "a"), (Fault.PASSES, "b")]
    assert "'x' is in its place" in found[0].what
