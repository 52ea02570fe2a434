"""Records the facts of a file with their places, and which attributes the plugin reads from which objects."""

from __future__ import annotations

import ast

from vllm_patchbay.audit.condition_expressions import ConditionReader
from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.audit.facts import Catch, Fact, FileFacts, Meaning, Meanings, Place, UnresolvedFact
from vllm_patchbay.audit.functions import FunctionSummary
from vllm_patchbay.audit.scopes import Instance, Parameter
from vllm_patchbay.upstream.modules import walk


class FactRecorder(ConditionReader):
    """Records facts in `result` while expressions are evaluated."""

    def __init__(self, result: FileFacts, module: str, roots: frozenset[str]) -> None:
        super().__init__(module, roots)
        self.result = result
        self.caught: tuple[Catch, ...] = ()
        """Try statements around the statement that is being read."""
        self.functions = FunctionSummary()

    def is_vllm_path(self, path: str) -> bool:
        """Returns whether a dotted name begins at the package vllm."""
        return path.partition(".")[0] == "vllm"

    def place(self, node: ast.AST) -> Place:
        """Returns the place of a node, with the conditions and try statements around it."""
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1
        return Place(line, column, self.reach, self.caught)

    def record(self, fact: Fact) -> None:
        """Adds a fact to the result. Facts are numbered in the order in which they are recorded."""
        self.result.facts.append(fact)

    def meanings(self, node: ast.expr) -> Meanings:
        """Returns the objects of vLLM or of the plugin that an expression may refer to."""
        return tuple(Meaning(ref, reach) for ref, reach in self.refs(node) if ref.root in self.roots)

    def record_read(self, owner: ast.expr, attribute: str) -> None:
        """Records that an attribute is read from an expression that is not an object of vLLM itself."""
        self.result.attributes_read.add(attribute)
        for alternative in self.values(owner):
            value = alternative.value
            if isinstance(value, Ref):
                if value.root in self.roots:
                    self.result.reads.add((attribute, "object", value.path))
            elif isinstance(value, Instance) and value.paths:
                self.result.reads.update((attribute, "object", path) for path in value.paths)
            elif isinstance(value, Parameter):
                self.result.reads.add((attribute, "parameter", value.function))
            else:
                self.result.reads.add((attribute, "unknown", ""))

    def record_operands(self, node: ast.AST, owners: Meanings) -> None:
        """Records that the functions in an expression are assigned to these vLLM objects, or are passed them."""
        paths = [meaning.ref.path for meaning in owners]
        functions = [self.scope.function] if self.scope.function else []
        for part in walk(node):
            if isinstance(part, ast.Lambda):
                functions.append(self.lambda_name(part))
            elif isinstance(part, ast.Name) and part.id in self.own_functions:
                functions.append(f"{self.module}.{part.id}")
            elif isinstance(part, (ast.Name, ast.Attribute)):
                functions += [ref.path for ref, _ in self.refs(part) if ref.root in self.roots and ref.root != "vllm"]
        self.result.operands.update((function, path) for function in functions for path in paths)

    def lambda_name(self, node: ast.Lambda) -> str:
        """Returns the name under which reads in a lambda are recorded: that of the outermost function around it, if
        there is one."""
        return self.scope.function or f"{self.module}.<lambda {node.lineno}:{node.col_offset}>"

    def record_unresolved(self, node: ast.AST, what: str) -> None:
        """Records that the source does not decide something about a node."""
        self.record(UnresolvedFact(self.place(node), what))
