"""Classifies statements and lists the parts of function definitions by their syntax alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from vllm_patchbay.upstream.modules import dotted, walk


def always_exits(statements: list[ast.stmt]) -> bool:
    """Returns whether control never passes the end of the block."""
    if not statements:
        return False
    last = statements[-1]
    if isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        return True
    if isinstance(last, ast.If):
        return bool(last.orelse) and always_exits(last.body) and always_exits(last.orelse)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return dotted(last.value.func) in ("sys.exit", "exit", "pytest.skip", "os._exit")
    return False


def only_imports(statements: list[ast.stmt]) -> bool:
    """Returns whether imports from vLLM or the standard library are all that can fail in these statements."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            roots = [alias.name.partition(".")[0] for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            roots = [(statement.module or ".").partition(".")[0]] if statement.level == 0 else ["."]
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Pass, ast.Expr)):
            if any(isinstance(node, (ast.Call, ast.Subscript)) for node in walk(statement)):
                return False
            continue
        else:
            return False
        if any(root != "vllm" and root not in sys.stdlib_module_names for root in roots):
            return False
    return True


def statements_in(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a block and all statements nested in them."""
    for statement in body:
        yield from (node for node in walk(statement) if isinstance(node, ast.stmt))


def is_static(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a method is a staticmethod."""
    return any(dotted(decorator) == "staticmethod" for decorator in node.decorator_list)


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """Returns all parameters, ``*args`` and ``**kwargs`` last."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*found, *(a for a in (arguments.vararg, arguments.kwarg) if a is not None)]


def defaults_of(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yields each parameter that has a default, and the default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        yield argument.arg, default
    for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if given is not None:
            yield argument.arg, given


def annotations_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """Yields the annotations of the parameters and of the return value."""
    for argument in arguments_of(node.args):
        if argument.annotation is not None:
            yield argument.annotation
    if node.returns is not None:
        yield node.returns
