"""Turns boolean expressions of a plugin into conditions on vLLM's version, its attributes and its modules."""

from __future__ import annotations

import ast
import re

from vllm_patchbay.audit import version_expressions
from vllm_patchbay.audit.conditions import (
    All,
    Always,
    Any,
    Condition,
    Exists,
    ModuleExists,
    NamedFlag,
    Reach,
    Ref,
    Unknown,
    VersionIs,
    negated,
)
from vllm_patchbay.audit.expressions import ExpressionReader
from vllm_patchbay.audit.scopes import Const, Flag, ModuleSpec, Value, VersionRange, VllmVersion
from vllm_patchbay.upstream.modules import dotted, walk

_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
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


class ConditionReader(ExpressionReader):
    """Evaluates boolean expressions to conditions."""

    def condition(self, node: ast.expr) -> Condition:
        """Returns the condition that the expression is true."""
        if isinstance(node, ast.BoolOp):
            parts = tuple(self.condition(part) for part in node.values)
            return All(parts) if isinstance(node.op, ast.And) else Any(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return negated(self.condition(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            compared = self._compare(node.left, node.ops[0], node.comparators[0])
            return compared if compared is not None else self._unknown_condition(node)
        if isinstance(node, ast.Compare):
            # A chain such as a < b < c.
            sides = [node.left, *node.comparators]
            links = [self._compare(sides[i], operator, sides[i + 1]) for i, operator in enumerate(node.ops)]
            known = tuple(link for link in links if link is not None)
            return All(known) if len(known) == len(links) else self._unknown_condition(node)
        found = self.values(node)
        truths = [(self._truth(alternative.value), alternative.reach) for alternative in found]
        if any(truth is None for truth, _ in truths):
            return self._unknown_condition(node)
        return _either([(truth, reach) for truth, reach in truths if truth is not None])

    def _truth(self, value: Value) -> Condition | None:
        """Returns the condition that a value is true; None if it is unknown."""
        if isinstance(value, Flag):
            return value.condition
        if isinstance(value, Const):
            return Always(bool(value.value))
        if isinstance(value, Ref) and value.root == "vllm":
            return Exists(value)
        if isinstance(value, Ref) and value.root in self.roots:
            return NamedFlag(value.path)
        if isinstance(value, ModuleSpec):
            return ModuleExists(value.module)
        return None

    def _unknown_condition(self, node: ast.expr) -> Unknown:
        self._unknown_count += 1
        names = [
            ref.path
            for part in walk(node)
            if isinstance(part, (ast.Name, ast.Attribute))
            for ref, _ in self.refs(part)
            if ref.root in self.roots and ref.root != "vllm"
        ]
        is_guard = any(_looks_like_guard(part) for part in walk(node)) or self.depends_on_version(node)
        return Unknown(self._unknown_count, is_guard, tuple(names))

    def _compare(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Condition | None:
        """Returns the condition of one comparison; None if the auditor cannot evaluate it."""
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
        if isinstance(second, VllmVersion) and isinstance(first, Const):
            first, second = second, first
            symbol = _MIRRORED.get(symbol, symbol)
        if isinstance(first, Ref) and first.path == "sys.version_info" and isinstance(second, Const):
            return version_expressions.python_comparison(symbol, second.value)
        if isinstance(first, VllmVersion) and isinstance(second, Const):
            return version_expressions.comparison(first, symbol, second.value)
        return None

    def _is_none(self, node: ast.expr) -> Condition | None:
        answers: list[tuple[Condition, Reach]] = []
        for alternative in self.values(node):
            value = alternative.value
            if isinstance(value, Const):
                answer: Condition = Always(value.value is None)
            elif isinstance(value, Ref):
                answer = negated(Exists(value))
            elif isinstance(value, ModuleSpec):
                answer = negated(ModuleExists(value.module))
            else:
                return None
            answers.append((answer, alternative.reach))
        return _either(answers)

    def _member_of(self, first: Value, right: ast.expr, is_negated: bool) -> Condition | None:
        if not isinstance(first, VllmVersion):
            return None
        allowed = self.single(right)
        if isinstance(allowed, VersionRange):
            inside = version_expressions.in_range(first, allowed.text)
            return negated(inside) if inside is not None and is_negated else inside
        if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            return None
        parts = [
            version_expressions.comparison(first, "==", value.value)
            if isinstance(value := self.single(element), Const)
            else None
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
            if isinstance(self.single(node.func.value), VllmVersion) and prefix is not None:
                return VersionIs("prefix", "==", prefix)
        if name == "contains" and isinstance(node.func, ast.Attribute) and node.args:
            allowed = self.single(node.func.value)
            if isinstance(allowed, VersionRange):
                return version_expressions.in_range(self.single(node.args[0]), allowed.text)
        if _VERSION_HELPER.fullmatch(name) and len(node.args) == 1 and not node.keywords:
            literal = self.string(node.args[0])
            word = re.sub(r"^_?(is_)?vllm_version_?", "", name) or "is"
            operator = _HELPER_OPERATORS.get(word)
            if literal is not None and operator is not None:
                return VersionIs("version", operator, literal)
        return None


def _either(answers: list[tuple[Condition, Reach]]) -> Condition:
    """Returns the condition that a name with several bindings is true, given the latest binding first.

    An earlier binding counts only if no later one was reached.
    """
    parts: list[Condition] = []
    later: list[Condition] = []
    for answer, reach in answers:
        conditions = (*later, *reach, answer)
        parts.append(conditions[0] if len(conditions) == 1 else All(conditions))
        if reach:
            later.append(negated(reach[0] if len(reach) == 1 else All(reach)))
    return parts[0] if len(parts) == 1 else Any(tuple(parts))


def _looks_like_guard(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return dotted(node.func).rpartition(".")[2] in _GUARD_CALLS
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name != "version_info" and bool(_GUARD_NAME.search(name))
