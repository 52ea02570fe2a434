"""Records the environment variables that a plugin reads, sets, or adds to the table in vllm.envs."""

from __future__ import annotations

import ast
import re

from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.audit.fact_recorder import FactRecorder
from vllm_patchbay.audit.facts import VariableFact
from vllm_patchbay.audit.scopes import Literal
from vllm_patchbay.upstream.modules import dotted

VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
"""Names of the environment variables that are audited."""


class EnvironmentReader(FactRecorder):
    """Records the environment variables of a plugin."""

    def merge_environment(self, target: ast.expr, value: ast.expr) -> None:
        """Records the variables of ``os.environ |= {…}``, or of the same with the table in vllm.envs."""
        owner = self.single(target)
        if dotted(target) in ("os.environ", "environ"):
            keys = self.key_nodes(value)
            for key in keys:
                self.record_variable(key, is_written=True)
            if not keys and not isinstance(value, ast.Dict):
                self.record_unresolved(target, "the names of the variables that are set are computed at run time")
        elif isinstance(owner, Ref) and owner.path == "vllm.envs.environment_variables":
            self.result.variables_declared.update(self.keys(value))

    def environment_call(self, node: ast.Call, function: str, name: str) -> None:
        """Records the variables of a call such as ``os.environ.get``, ``os.getenv`` or ``monkeypatch.setenv``.

        `function` is the dotted name of what is called, and `name` its last part.
        """
        owner = function.rpartition(".")[0]
        if name in ("get", "pop", "setdefault", "update") and owner.rpartition(".")[2] == "environ":
            if name == "update":
                self._record_table(node)
            elif node.args:
                self.record_variable(node.args[0], is_written=name == "setdefault")
        elif name == "dict" and node.args and is_environment(node.args[0]):
            for keyword in node.keywords:
                if keyword.arg is not None and VARIABLE.fullmatch(keyword.arg):
                    self.record(VariableFact(self.place(keyword), keyword.arg, True))
        elif name in ("getenv", "setenv", "putenv") and node.args:
            self.record_variable(node.args[0], is_written=name != "getenv")
        elif name == "update" and node.args:
            found = self.single(node.func.value) if isinstance(node.func, ast.Attribute) else None
            if isinstance(found, Ref) and found.path == "vllm.envs.environment_variables":
                self.result.variables_declared.update(self.keys(node.args[0]))
            elif isinstance(found, Literal) and isinstance(found.node, ast.Dict):
                added = self.single(node.args[0])
                if isinstance(added, Literal) and isinstance(added.node, ast.Dict):
                    found.more.extend((key, value) for key, value in added.pairs() if key is not None)
            if "env" in owner.rpartition(".")[2].lower() and not isinstance(found, Ref):
                self._record_table(node)  # an environment for another process
        elif function.endswith("patch.dict") and len(node.args) > 1 and "environ" in ast.dump(node.args[0]):
            for key in self.key_nodes(node.args[1]):
                self.record_variable(key, is_written=True)

    def _record_table(self, node: ast.Call) -> None:
        """Records the keys and keyword arguments of an ``update`` call as variables that are set."""
        for argument in node.args:
            for key in self.key_nodes(argument):
                self.record_variable(key, is_written=True)
        for keyword in node.keywords:
            if keyword.arg is not None and VARIABLE.fullmatch(keyword.arg):
                self.record(VariableFact(self.place(keyword), keyword.arg, True))

    def key_nodes(self, node: ast.expr) -> list[ast.expr]:
        """Returns the keys of a dictionary display; empty for another expression."""
        table = self.single(node)
        if not isinstance(table, Literal) or not isinstance(table.node, ast.Dict):
            return []
        return [key for key, _ in table.pairs() if key is not None]

    def keys(self, node: ast.expr) -> set[str]:
        """Returns the keys of a dictionary display that are known strings."""
        return {text for key in self.key_nodes(node) if (text := self.string(key)) is not None}

    def record_variable(self, node: ast.expr, *, is_written: bool) -> None:
        """Records a read or write of the variable that the expression names, if its name begins with ``VLLM_``."""
        name = self.string(node)
        if name is not None and VARIABLE.fullmatch(name):
            self.record(VariableFact(self.place(node), name, is_written))


def is_environment(node: ast.expr) -> bool:
    """Returns whether an expression is ``os.environ`` or a copy of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
        node = node.func.value
    return dotted(node) in ("os.environ", "environ")
