"""Records what the expressions of a plugin do with vLLM: attributes they read, and calls that patch or register."""

from __future__ import annotations

import ast
import re

from vllm_patchbay.audit.conditions import Condition, NamedFlag, Ref, is_portable, negated
from vllm_patchbay.audit.environment import VARIABLE as _VARIABLE
from vllm_patchbay.audit.environment import EnvironmentReader, is_environment
from vllm_patchbay.audit.facts import (
    CallFact,
    ImportFact,
    KernelFact,
    Meaning,
    Meanings,
    PatchFact,
    PathFact,
    Place,
    RegisterFact,
    UseFact,
)
from vllm_patchbay.audit.scopes import Const, Literal, ParameterDefault, VersionDerived, VllmVersion
from vllm_patchbay.upstream.modules import children, dotted

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_READERS = frozenset({"get", "getenv", "pop", "__getitem__"})
_WRITERS = frozenset({"setdefault", "setenv", "putenv"})


class CallReader(EnvironmentReader):
    """Records the facts in the expressions of a plugin."""

    # --- expressions

    def read_expression(self, node: ast.AST) -> None:
        """Records the facts of an expression and of all expressions in it."""
        if isinstance(node, ast.Attribute):
            self._read_attribute(node)
        elif isinstance(node, ast.Call):
            if not _is_guard_of_some_versions(node):
                self._read_call(node)
        elif isinstance(node, ast.Lambda):
            self.lambda_expression(node)
        elif isinstance(node, ast.IfExp):
            self.read_expression(node.test)
            test = self.condition(node.test)
            self._read_under(test, node.body)
            self._read_under(negated(test), node.orelse)
        elif isinstance(node, ast.BoolOp):
            outer = self.reach
            for part in node.values:
                self.read_expression(part)
                test = self.condition(part)
                self.reach = (*self.reach, test if isinstance(node.op, ast.And) else negated(test))
            self.reach = outer
        elif isinstance(node, ast.Compare):
            self._read_comparison(node)
        elif isinstance(node, ast.Constant):
            self._read_string(node)
        elif isinstance(node, ast.Subscript):
            self._read_item(node)
        elif isinstance(node, ast.Dict):
            self._read_dict(node)
        elif isinstance(node, ast.NamedExpr):
            self.read_expression(node.value)
            self.scope.bind(node.target.id, self.values(node.value), self.reach)
        elif isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    self.read_expression(part)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and is_environment(node.left):
            for key in self.key_nodes(node.right):
                self.record_variable(key, is_written=True)
            self.read_expression(node.right)
        elif isinstance(node, ast.Name):
            return
        else:
            for child in children(node):
                self.read_expression(child)

    def lambda_expression(self, node: ast.Lambda) -> None:
        """Reads a lambda. `FileReader` implements it, because the body runs later."""
        raise NotImplementedError

    def _read_under(self, condition: Condition, node: ast.expr) -> None:
        outer = self.reach
        self.reach = (*outer, condition)
        self.read_expression(node)
        self.reach = outer

    def _read_comparison(self, node: ast.Compare) -> None:
        """Reads a comparison, without strings that are compared: a path among them need not exist."""
        for side in [node.left, *node.comparators]:
            if not isinstance(side, ast.Constant):
                self.read_expression(side)
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and dotted(node.comparators[0]).endswith("environ"):
            self.record_variable(node.left, is_written=False)

    def _read_attribute(self, node: ast.Attribute) -> None:
        found = self.meanings(node)
        of_vllm = tuple(meaning for meaning in found if meaning.ref.root == "vllm" and meaning.ref.rest)
        if of_vllm:
            self.record(UseFact(self.place(node), of_vllm))
        else:
            self.record_read(node.value, node.attr)
            self.read_expression(node.value)

    def _read_string(self, node: ast.Constant) -> None:
        """Records a string that is ``module:name``, or a dotted path whose last part is named like a class."""
        text = node.value
        if not isinstance(text, str) or not 4 < len(text) < 200 or not _PATH.fullmatch(text):
            return
        if text.partition(".")[0] in self.roots:
            module, colon, name = text.partition(":")
            last = text.rpartition(".")[2]
            if colon:
                self.record(PathFact(self.place(node), module, name))
            elif last[0].isupper() and not last.isupper():
                self.record(PathFact(self.place(node), "", text))

    def _read_dict(self, node: ast.Dict) -> None:
        sets_variables = any(
            key is None and is_environment(value) for key, value in zip(node.keys, node.values, strict=True)
        )
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                if sets_variables:
                    self.record_variable(key, is_written=True)
                name = self.string(key)
                if name is not None and _VARIABLE.fullmatch(name) and isinstance(value, (ast.Lambda, ast.Call)):
                    # A table of variables and functions that read them, like the one in vllm.envs.
                    self.result.variables_mentioned.add(name)
                self.read_expression(key)
            self.read_expression(value)

    def _read_item(self, node: ast.Subscript) -> None:
        if dotted(node.value) in ("os.environ", "environ"):
            self.record_variable(node.slice, is_written=not isinstance(node.ctx, ast.Load))
            return
        self.read_expression(node.value)
        self.read_expression(node.slice)

    # --- assignments

    def set_attribute(self, target: ast.Attribute, value: ast.expr | None = None) -> None:
        """Records an assignment to an attribute."""
        owners = self.meanings(target.value)
        self.result.attributes_set.add(target.attr)
        if owners:
            self._read_owner(target.value)
            self._record_patch(self.place(target), owners, target.attr, value)
        else:
            for alternative in self.values(target.value):
                if isinstance(alternative.value, ParameterDefault):
                    default = alternative.value.path
                    self.record_unresolved(target, f"{target.attr} is set on a parameter whose default is {default}")
            self.read_expression(target.value)

    def _record_patch(
        self, place: Place, owners: Meanings, attribute: str, value: ast.expr | None, may_create: bool = False
    ) -> None:
        if value is not None:
            self.record_operands(value, tuple(meaning for meaning in owners if meaning.ref.root in self.roots))
        is_function = isinstance(value, ast.Name) and value.id in self.own_functions
        is_plain = is_function or isinstance(value, (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Lambda))
        self.record(PatchFact(place, owners, attribute, may_create, is_plain))

    def namespace_of(self, node: ast.expr) -> Meanings:
        """Returns the objects that x may be in ``vars(x)`` or ``x.__dict__``; empty for another expression."""
        if isinstance(node, ast.Call) and dotted(node.func) == "vars" and len(node.args) == 1:
            return self.meanings(node.args[0])
        return self.meanings(node.value) if isinstance(node, ast.Attribute) and node.attr == "__dict__" else ()

    def set_in_namespace(self, owners: Meanings, key: str | None, target: ast.Subscript) -> None:
        """Records an assignment to an item of ``vars(x)`` or ``x.__dict__``."""
        if key is not None:
            self.result.attributes_set.add(key)
            self.record(PatchFact(self.place(target), owners, key))
        else:
            self._record_computed_name(target, owners)

    def _record_computed_name(self, node: ast.AST, owners: Meanings) -> None:
        """Records that an attribute is set whose name the source does not give, if its owner may be vLLM's."""
        if any(meaning.ref.root == "vllm" for meaning in owners):
            path = owners[0].ref.path
            self.record_unresolved(node, f"the name of the attribute set on {path} is computed at run time")

    def augmented_target(self, target: ast.expr) -> None:
        """Records the read of the target of an augmented assignment."""
        if isinstance(target, ast.Attribute):
            found = tuple(m for m in self.meanings(target) if m.ref.root == "vllm")
            if found:
                self.record(UseFact(self.place(target), found))
            else:
                self.record_read(target.value, target.attr)
        elif isinstance(target, ast.Subscript):
            self.read_expression(target.value)

    def set_item_of_mapping(self, target: ast.Subscript) -> None:
        """Records ``env["VLLM_…"] = "1"``, where env is an environment for another process."""
        if "env" in dotted(target.value).rpartition(".")[2].lower():
            self.record_variable(target.slice, is_written=True)

    def set_item_of(self, owner: Ref, key: str | None, target: ast.Subscript) -> None:
        """Records an assignment to an item of the environment or of one of vLLM's tables."""
        if owner.path == "os.environ":
            self.record_variable(target.slice, is_written=True)
        elif owner.path.endswith("custom_op.op_registry_oot"):
            if key is None:
                self.record_unresolved(target, "the name of the registration is computed at run time")
            else:
                self.record(RegisterFact(self.place(target.slice), (Meaning(Ref(owner.base)),), key))
        elif owner.path == "vllm.envs.environment_variables":
            if key is not None:
                self.result.variables_declared.add(key)
            self.result.declared_by_constant.update(ref.path for ref, _ in self.refs(target.slice))

    def record_module_names(self) -> None:
        """Records the module's constants, flags and functions that other files of the plugin may use by name."""
        for name in self.scope.names:
            value = self.string(ast.Name(name, ast.Load()))
            if value is not None and _VARIABLE.fullmatch(value):
                self.result.constants[f"{self.module}.{name}"] = value
            self._record_flag(name, ast.Name(name, ast.Load()))
            if any(isinstance(a.value, (VllmVersion, VersionDerived)) for a in self.scope.names[name]):
                self.result.version_dependent.add(f"{self.module}.{name}")
        for name in self.own_functions:
            if self.mentions_version and self.function_reads_version(name):
                self.result.version_dependent.add(f"{self.module}.{name}")
        for name, setter in self.functions.setters.items():
            self.result.setters[f"{self.module}.{name}"] = setter
        for name, helper in self.helpers.items():
            if not helper.parameters:
                self._record_flag(f"{name}()", ast.Call(ast.Name(name, ast.Load()), [], []))

    def _record_flag(self, name: str, value: ast.expr) -> None:
        condition = self.condition(value)
        own = f"{self.module}.{name}"
        if is_portable(condition) and condition != NamedFlag(own):
            self.result.flags[own] = condition

    def _read_owner(self, node: ast.expr) -> None:
        if isinstance(node, ast.Attribute):
            self._read_attribute(node)
        else:
            self.read_expression(node)

    # --- calls

    def decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Reads the decorators of a definition."""
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Attribute) and decorator.attr == "register_oot":
                self._register_oot(decorator, None, decorator)
            if isinstance(decorator, ast.Call):
                given = tuple(m for argument in decorator.args for m in self.meanings(argument) if m.ref.root == "vllm")
                if given:
                    self.record_operands(ast.Name(node.name, ast.Load()), given)
            self.read_expression(decorator)

    def _read_call(self, node: ast.Call) -> None:
        function = dotted(node.func)
        name = function.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        if name == "register_oot" and isinstance(node.func, ast.Attribute):
            self._register_oot(node.func, node, node)
        elif name == "register_kernels" and node.args:
            self._kernels(node.args[0])
        elif name in ("setattr", "patch", "object") or function.endswith("monkeypatch.setattr"):
            self._patching_call(node, function, name)
        elif function in ("type.__setattr__", "object.__setattr__"):
            self._patching_call(node, function, "setattr")
        elif function in self.functions.setters:
            self._setter_call(node, *self.functions.setters[function])
        elif name in ("import_module", "__import__") and node.args:
            self._dynamic_import(node)
        elif name in ("getattr", "hasattr") and len(node.args) >= 2:
            self._attribute_by_name(node, name)
        elif name in _READERS | _WRITERS | {"update", "dict"}:
            self.environment_call(node, function, name)
        if function and node.args:
            self._plugin_function_call(node, function)
        if name.startswith("register") or name == "extend_enum":
            self._registration_call(node)
        if node.args and name not in _WRITERS:
            mentioned = self.string(node.args[0])
            if mentioned is not None and _VARIABLE.fullmatch(mentioned):
                self.result.variables_mentioned.add(mentioned)
        self.read_expression(node.func)
        is_lookup = name in ("find_spec", "importorskip", "getLogger", "init_logger", "patch", "setattr")
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if not (is_lookup and isinstance(argument, ast.Constant)):
                self.read_expression(argument)

    def _register_oot(self, function: ast.Attribute, call: ast.Call | None, node: ast.AST) -> None:
        owners = self.meanings(function.value)
        if not owners:
            return
        given = None
        if call is not None:
            given = next((keyword.value for keyword in call.keywords if keyword.arg == "name"), None)
            given = given if given is not None else (call.args[1] if len(call.args) > 1 else None)
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            self.record(RegisterFact(self.place(node), owners))
            return
        for alternative in self.values(given):
            value = alternative.value
            if isinstance(value, Const) and isinstance(value.value, str):
                place = (
                    Place(value.line, value.column + 1, self.reach, self.caught) if value.line else self.place(given)
                )
                self.record(RegisterFact(place, owners, value.value))
            elif isinstance(given, ast.Attribute) and given.attr == "__name__":
                for meaning in self.meanings(given.value):
                    self.record(RegisterFact(self.place(given), owners, meaning.ref.path.rpartition(".")[2]))
            else:
                self.record_unresolved(given, "the name of the registration is computed at run time")

    def _place_of_name(self, name: ast.expr, otherwise: ast.AST) -> Place:
        """Returns the place of the string that a name comes from, such as its line in a table, else that of
        `otherwise`."""
        value = self.single(name)
        if isinstance(value, Const) and value.line and not isinstance(name, ast.Constant):
            return Place(value.line, value.column + 1, self.reach, self.caught)
        return self.place(otherwise)

    def _kernels(self, node: ast.expr) -> None:
        table = self.single(node)
        if not isinstance(table, Literal) or not isinstance(table.node, ast.Dict):
            self.record_unresolved(node, "the paths of the replaced kernels are computed at run time")
            return
        for key, _ in table.pairs():
            path = self.string(key)
            if path is None:
                self.record_unresolved(key or node, "the path of the replaced kernel is computed at run time")
            else:
                self.record(KernelFact(self.place(key or node), path))

    def _patching_call(self, node: ast.Call, function: str, name: str) -> None:
        arguments = node.args
        may_create = any(
            (keyword.arg == "create" and isinstance(keyword.value, ast.Constant) and bool(keyword.value.value))
            or (keyword.arg == "raising" and isinstance(keyword.value, ast.Constant) and not keyword.value.value)
            for keyword in node.keywords
        )
        if name == "object" and not function.endswith("patch.object"):
            return
        path = self.string(arguments[0]) if arguments else None
        if path is not None and _PATH.fullmatch(path) and self.is_vllm_path(path) and name != "object":
            owner, _, attribute = path.rpartition(".")
            first, *rest = owner.split(".")
            owners: Meanings = (Meaning(Ref(first, tuple(rest))),)
            if rest:
                self.record(UseFact(self.place(arguments[0]), owners))
            value = arguments[1] if len(arguments) > 1 else None
            self._record_patch(self.place(arguments[0]), owners, attribute, value, may_create)
        elif len(arguments) >= 2 and name != "patch":
            owners = self.meanings(arguments[0])
            attribute_name = self.string(arguments[1])
            if attribute_name is not None:
                self.result.attributes_set.add(attribute_name)
                if owners:
                    value = arguments[2] if len(arguments) > 2 else None
                    self._record_patch(
                        self._place_of_name(arguments[1], node), owners, attribute_name, value, may_create
                    )
            else:
                self._record_computed_name(node, owners)

    def _setter_call(self, node: ast.Call, owner: int, name: int) -> None:
        """Records a call of a function of this file that sets an attribute by name."""
        if max(owner, name) < len(node.args):
            owners, attribute = self.meanings(node.args[owner]), self.string(node.args[name])
            if owners and attribute is not None:
                self.record(PatchFact(self._place_of_name(node.args[name], node), owners, attribute))
            else:
                self._record_computed_name(node, owners)

    def _plugin_function_call(self, node: ast.Call, function: str) -> None:
        """Records a call that passes an object of vLLM to a function of the plugin."""
        is_here = function in self.own_functions
        there = () if is_here else [ref.path for ref, _ in self.refs(node.func) if ref.root in self.roots - {"vllm"}]
        if not is_here and not there:
            return
        given = [self.meanings(argument) for argument in node.args]
        of_vllm = tuple(meaning for meanings in given for meaning in meanings)
        if not of_vllm:
            return
        self.record_operands(node.func, of_vllm)
        for path in there:
            arguments = tuple(
                (meanings, self.string(argument), self._place_of_name(argument, node))
                for argument, meanings in zip(node.args, given, strict=True)
            )
            self.record(CallFact(self.place(node), path, arguments))

    def _dynamic_import(self, node: ast.Call) -> None:
        module = self.string(node.args[0])
        if module is not None:
            if self.is_vllm_path(module):
                self.record(ImportFact(self.place(node), module))
        elif isinstance(node.args[0], ast.JoinedStr):
            first = node.args[0].values[0] if node.args[0].values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("vllm."):
                self.record_unresolved(node, "the name of the imported vLLM module is computed at run time")

    def _attribute_by_name(self, node: ast.Call, name: str) -> None:
        attribute = self.string(node.args[1])
        if attribute is None:
            return
        owners = tuple(m for m in self.meanings(node.args[0]) if m.ref.root == "vllm")
        if not owners:
            self.record_read(node.args[0], attribute)
        elif name == "getattr" and len(node.args) == 2:
            used = tuple(Meaning(meaning.ref.attribute(attribute), meaning.reach) for meaning in owners)
            self.record(UseFact(self.place(node), used))
        else:
            # The plugin handles a missing attribute. If it also sets the attribute, it does so for its own use.
            self.result.attributes_read.add(attribute)
            self.result.reads.update((attribute, "object", meaning.ref.path) for meaning in owners)

    def _registration_call(self, node: ast.Call) -> None:
        """Records the names and paths in a call such as ``register_connector("Name", "package.module", "Class")``."""
        for argument in node.args:
            text = self.string(argument)
            if text is not None and text.isidentifier():
                self.result.names_registered.add(text)
        if len(node.args) < 3:
            return
        for first, second in zip(node.args, node.args[1:], strict=False):
            module, name = self.string(first), self.string(second)
            if module is None or name is None or not name.isidentifier() or not _MODULE.fullmatch(module):
                continue
            if "." in module and module.partition(".")[0] in self.roots:
                self.record(PathFact(self.place(second), module, name))


def _is_guard_of_some_versions(node: ast.Call) -> bool:
    """Returns whether a call declares a guard (`patch/guard.py`) with `versions`: its targets are checked with these
    versions, and other releases need not have them."""
    name = dotted(node.func).rpartition(".")[2]
    return name == "guarded" and any(keyword.arg == "versions" for keyword in node.keywords)
