"""Notes down what a file says: facts with their places, and what is read from what."""

from __future__ import annotations

import ast

from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.audit.facts import Catch, Fact, FileFacts, Meaning, Meanings, Place, UnresolvedFact
from vllm_patchbay.audit.functions import Functions
from vllm_patchbay.audit.guards import Guards
from vllm_patchbay.audit.scopes import Instance, Parameter
from vllm_patchbay.upstream.modules import walk


class Noting(Guards):
    def __init__(self, result: FileFacts, module: str, roots: frozenset[str]) -> None:
        super().__init__(module, roots)
        self.result = result
        self.caught: tuple[Catch, ...] = ()
        self.functions = Functions()

    def is_of_vllm(self, path: str) -> bool:
        return path.partition(".")[0] == "vllm"

    def place(self, node: ast.AST) -> Place:
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1
        return Place(line, column, self.reach, self.caught)

    def fact(self, fact: Fact) -> None:
        self.result.facts.append(fact)

    def meanings(self, node: ast.expr) -> Meanings:
        """What of vLLM or of the plugin an expression may stand for."""
        return tuple(Meaning(ref, reach) for ref, reach in self.refs(node) if ref.root in self.roots)

    def read(self, owner: ast.expr, attribute: str) -> None:
        self.result.attributes_read.add(attribute)
        for alternative in self.values(owner):
            value = alternative.value
            if isinstance(value, Ref):
                if value.root in self.roots:
                    self.result.reads.add((attribute, "of", value.path))
            elif isinstance(value, Instance) and value.paths:
                self.result.reads.update((attribute, "of", path) for path in value.paths)
            elif isinstance(value, Parameter):
                self.result.reads.add((attribute, "by", value.function))
            else:
                self.result.reads.add((attribute, "?", ""))

    def takes(self, given: ast.AST, owners: Meanings) -> None:
        """The functions in an expression are put onto these owners, or given them."""
        paths = [meaning.ref.path for meaning in owners]
        functions = [self.scope.function] if self.scope.function else []
        for part in walk(given):
            if isinstance(part, ast.Lambda):
                functions.append(self.lambda_name(part))
            elif isinstance(part, ast.Name) and part.id in self.own_functions:
                functions.append(f"{self.module}.{part.id}")
            elif isinstance(part, (ast.Name, ast.Attribute)):
                functions += [ref.path for ref, _ in self.refs(part) if ref.root in self.roots and ref.root != "vllm"]
        self.result.takes.update((function, path) for function in functions for path in paths)

    def lambda_name(self, node: ast.Lambda) -> str:
        return self.scope.function or f"{self.module}.<lambda {node.lineno}:{node.col_offset}>"

    def unresolved(self, node: ast.AST, what: str) -> None:
        self.fact(UnresolvedFact(self.place(node), what))
