"""Reads one file of a plugin into facts. The file is parsed, never imported.

Statements are read in order. Function bodies are read after the module that defines them, because that is when they
run. Loops over literals are unrolled, because plugins register and patch from tables.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

from vllm_patchbay.audit import version_expressions
from vllm_patchbay.audit.calls import CallReader
from vllm_patchbay.audit.class_facts import class_fact
from vllm_patchbay.audit.conditions import Condition, Reach, Ref, TryCompleted, TypeChecking, Unknown, negated
from vllm_patchbay.audit.expressions import imported
from vllm_patchbay.audit.facts import Catch, FileFacts, ImportFact, ModuleFact
from vllm_patchbay.audit.functions import GUARDED_EXCEPTIONS, catch_of, caught_by, summarize_functions
from vllm_patchbay.audit.scopes import (
    UNKNOWN_VALUE,
    Alternative,
    Instance,
    Literal,
    Parameter,
    ParameterDefault,
    Scope,
    Skip,
    VersionDerived,
    VllmVersion,
)
from vllm_patchbay.audit.statement_forms import (
    always_exits,
    annotations_of,
    arguments_of,
    defaults_of,
    is_static,
    only_imports,
    statements_in,
)
from vllm_patchbay.upstream.modules import absolute, bound_names, children, dotted, is_type_checking, walk

_MAX_UNROLLED_ITERATIONS = 256
_RECURSION_LIMIT = 8000
_MAX_UNROLLED_STATEMENTS = 4096
_MAX_ANNOTATION_LENGTH = 200
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_file(file: str, source: str, module: str, is_package: bool, roots: frozenset[str]) -> FileFacts:
    """Returns the facts of a file. Raises what ast.parse raises for source that is not Python.

    `roots` are the top-level packages of vLLM and of the plugin.
    """
    tree = ast.parse(source)
    reader = FileReader(FileFacts(file), module, is_package, roots)
    reader.mentions_version = "version" in source
    limit = sys.getrecursionlimit()
    # A long chain of elif is a deep tree. The limit is not raised for parsing, which recurses on the C stack.
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    try:
        reader.read_module(tree)
    finally:
        sys.setrecursionlimit(limit)
    return reader.result


class FileReader(CallReader):
    """Reads the statements of a file and records its facts."""

    def __init__(self, result: FileFacts, module: str, is_package: bool, roots: frozenset[str]) -> None:
        super().__init__(result, module, roots)
        self.package = module if is_package else module.rpartition(".")[0]
        self._deferred: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, Scope, Reach]] = []
        self._annotations_run = True
        self._unrolled = 0

    def read_module(self, tree: ast.Module) -> None:
        """Reads the whole file, module level first."""
        self._annotations_run = not any(
            isinstance(statement, ast.ImportFrom)
            and statement.module == "__future__"
            and any(alias.name == "annotations" for alias in statement.names)
            for statement in tree.body
        )
        self.functions = summarize_functions(tree)
        self.helpers = self.functions.helpers
        self.own_functions = {statement.name: statement for statement in tree.body if isinstance(statement, _FUNCTION)}
        self.read_block(tree.body)
        self.record_module_names()
        while self._deferred:
            function, scope, reach = self._deferred.pop(0)
            self.scope, self.reach, self.caught = scope, reach, ()
            if isinstance(function, ast.Lambda):
                self.read_expression(function.body)
            else:
                if scope.parent is not None and scope.parent.parent is None:
                    self.caught = self.functions.caught.get(function.name, ())
                self.read_block(function.body)

    # --- statements

    def read_block(self, statements: Iterable[ast.stmt]) -> None:
        """Reads statements in order. If one exits the block under a condition, the rest runs only under its
        negation."""
        outer = self.reach
        for statement in statements:
            rest = self.read_statement(statement)
            if rest:
                self.reach = (*self.reach, *rest)
        self.reach = outer

    def read_statement(self, node: ast.stmt) -> Reach:
        """Reads one statement, and returns the conditions that hold for the statements after it in the block."""
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self._try(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, _FUNCTION):
            self._function(node)
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assign(node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._for(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._with(node)
        elif isinstance(node, ast.While):
            self.read_expression(node.test)
            self._read_branch(node.body, self.condition(node.test))
            self._read_branch(node.orelse, self.new_unknown())
        elif isinstance(node, ast.Match):
            self._match(node)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                self.scope.outer_names[name] = self.scope.module_scope()
        else:
            for child in children(node):
                if isinstance(child, ast.expr):
                    self.read_expression(child)
        return ()

    def _read_branch(self, statements: list[ast.stmt], *conditions: Condition) -> None:
        outer = self.reach
        self.reach = (*outer, *conditions)
        self.read_block(statements)
        self.reach = outer

    def _if(self, node: ast.If) -> Reach:
        if is_type_checking(node.test):
            self._read_branch(node.body, TypeChecking())
            self.read_block(node.orelse)
            return ()
        self.read_expression(node.test)
        test = self.condition(node.test)
        self._read_branch(node.body, test)
        self._read_branch(node.orelse, negated(test))
        if isinstance(test, Unknown) and not test.is_guard and not test.names:
            # Ordinary control flow decides no finding. Its conditions would only pile up in a long function.
            return ()
        if always_exits(node.body):
            return (negated(test),)
        return (test,) if node.orelse and always_exits(node.orelse) else ()

    def _match(self, node: ast.Match) -> None:
        self.read_expression(node.subject)
        subject = self.single(node.subject)
        earlier: tuple[Condition, ...] = ()
        for case in node.cases:
            for part in walk(case.pattern):
                if isinstance(part, ast.expr) and not isinstance(part, ast.Constant):
                    self.read_expression(part)
            found = (
                version_expressions.pattern_condition(subject, case.pattern)
                if isinstance(subject, VllmVersion)
                else None
            )
            test = found or self.new_unknown(is_guard=isinstance(subject, (VllmVersion, VersionDerived)))
            conditions = [*earlier, test]
            if case.guard is not None:
                self.read_expression(case.guard)
                conditions.append(self.condition(case.guard))
            elif found is not None:
                earlier = (*earlier, negated(found))
            self._read_branch(case.body, *conditions)

    def _try(self, node: ast.Try | ast.TryStar) -> Reach:
        outer = self.caught
        self.caught = (*outer, *catch_of(node))
        start = len(self.result.facts)
        self.read_block(node.body)
        self.caught = outer
        caught = frozenset().union(*map(caught_by, node.handlers)) & GUARDED_EXCEPTIONS
        completed: Condition = (
            TryCompleted(start, len(self.result.facts), caught, only_imports(node.body))
            if caught
            else self.new_unknown()
        )
        for handler in node.handlers:
            if handler.type is not None:
                self.read_expression(handler.type)
            if handler.name:
                self.scope.bind(handler.name, UNKNOWN_VALUE, (*self.reach, negated(completed)))
            self._read_branch(handler.body, negated(completed))
        self._read_branch(node.orelse, completed)
        self.read_block(node.finalbody)
        return (completed,) if node.handlers and all(always_exits(handler.body) for handler in node.handlers) else ()

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        outer = self.caught
        for item in node.items:
            self.read_expression(item.context_expr)
            call = item.context_expr
            if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] in ("suppress", "raises"):
                caught = frozenset(dotted(argument).rpartition(".")[2] for argument in call.args)
                if caught & GUARDED_EXCEPTIONS:
                    # An exception that a test expects is not a fault.
                    self.caught = (*self.caught, Catch(caught, dotted(call.func).endswith("raises")))
            if item.optional_vars is not None:
                for name in bound_names(item.optional_vars):
                    self.scope.bind(name, UNKNOWN_VALUE, self.reach)
        self.read_block(node.body)
        self.caught = outer

    # --- imports

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self.is_vllm_path(alias.name):
                    self.record(ImportFact(self.place(node), alias.name))
                name = alias.asname or alias.name.partition(".")[0]
                self.scope.bind(name, [Alternative(Ref(alias.name if alias.asname else name))], self.reach)
            return
        module = absolute(self.package, node.level, node.module)
        for alias in node.names:
            if self.is_vllm_path(module):
                self.record(ImportFact(self.place(alias), module, "" if alias.name == "*" else alias.name))
            if alias.name == "*":
                self.scope.module_scope().star_imports.append(module)
            else:
                value = imported(f"{module}.{alias.name}")
                self.scope.bind(alias.asname or alias.name, [Alternative(value)], self.reach)

    # --- definitions

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.decorators(node)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.read_expression(default)
        if self._annotations_run:
            for annotation in annotations_of(node):
                self.read_expression(annotation)
        self.scope.bind(node.name, UNKNOWN_VALUE, self.reach)
        outer = self.reach
        self.reach = (*outer, *self._skip_conditions(node))
        scope = Scope(self._enclosing(), base=self.reach)
        scope.function = scope.function or ".".join([self.module, *self.scope.instances[:1], node.name])
        for argument in arguments_of(node.args):
            scope.bind(argument.arg, self._argument_value(argument, scope), self.reach)
        if self.scope.is_class and node.args.args and not is_static(node):
            scope.bind(node.args.args[0].arg, [Alternative(Instance(self.scope.instances))], self.reach)
        for name, default in defaults_of(node.args):
            defaults = [
                Alternative(ParameterDefault(m.ref.path)) for m in self.meanings(default) if m.ref.root == "vllm"
            ]
            if defaults:
                scope.bind(name, defaults, self.reach)
        self._deferred.append((node, scope, self.reach))
        self.reach = outer

    def _skip_conditions(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Reach:
        """Returns the conditions under which a test runs, by its skip marks and those of its file."""
        marks = [alternative for decorator in node.decorator_list for alternative in self.values(decorator)]
        if self.scope.parent is None and node.name.lower().startswith("test"):
            of_file = self.single(ast.Name("pytestmark", ast.Load()))
            elements = of_file.pairs() if isinstance(of_file, Literal) else []
            marks += [Alternative(of_file), *(a for _, element in elements for a in self.values(element))]
        return tuple(mark.value.runs for mark in marks if isinstance(mark.value, Skip))

    def _argument_value(self, argument: ast.arg, scope: Scope) -> list[Alternative]:
        paths = tuple(self._annotated_classes(argument.annotation)) if argument.annotation is not None else ()
        return [Alternative(Instance(paths) if paths else Parameter(scope.function))]

    def _annotated_classes(self, node: ast.expr) -> Iterator[str]:
        """Yields the dotted names of the classes of vLLM or of the plugin that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < _MAX_ANNOTATION_LENGTH:
            try:
                yield from self._annotated_classes(ast.parse(node.value.strip(), mode="eval").body)
            except SyntaxError:
                return
        elif isinstance(node, ast.BinOp):
            yield from self._annotated_classes(node.left)
            yield from self._annotated_classes(node.right)
        elif isinstance(node, ast.Subscript):
            if dotted(node.value).rpartition(".")[2] in ("Optional", "type", "Type"):
                yield from self._annotated_classes(node.slice)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            yield from (meaning.ref.path for meaning in self.meanings(node))

    def lambda_expression(self, node: ast.Lambda) -> None:
        """Reads the body of a lambda after the module, like that of a function."""
        scope = Scope(self._enclosing(), base=self.reach)
        scope.function = self.lambda_name(node)
        for argument in arguments_of(node.args):
            scope.bind(argument.arg, [Alternative(Parameter(scope.function))], self.reach)
        self._deferred.append((node, scope, self.reach))

    def _enclosing(self) -> Scope:
        # Methods do not see the names of their class, but those of the scope around it.
        return self.scope.parent if self.scope.is_class and self.scope.parent is not None else self.scope

    def _class(self, node: ast.ClassDef) -> None:
        self.decorators(node)
        for base in node.bases:
            self.read_expression(base)
        for keyword in node.keywords:
            self.read_expression(keyword.value)
        bases = tuple(self.meanings(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
        self.record(class_fact(node, bases, self.package, self.place(node), self.place))
        self.result.classes.add(node.name)
        own = Ref(f"{self.module}.{node.name}")
        is_global = self.scope.parent is None
        self.scope.bind(node.name, [Alternative(own)] if is_global else UNKNOWN_VALUE, self.reach)
        outer, reach = self.scope, self.reach
        self.reach = (*reach, *self._skip_conditions(node))
        self.scope = Scope(outer, base=self.reach, is_class=True)
        of_bases = (meaning.ref.path for meanings in bases for meaning in meanings)
        self.scope.instances = (own.path,) if is_global else tuple(of_bases)
        self.read_block(node.body)
        self.scope, self.reach = outer, reach

    # --- assignments

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if node.value is not None:
            self.read_expression(node.value)
        if isinstance(node, ast.AnnAssign) and self._annotations_run:
            self.read_expression(node.annotation)
        if isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.BitOr):
                self.merge_environment(node.target, node.value)
            self.augmented_target(node.target)
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        values = self.values(node.value) if node.value is not None else None
        for target in targets:
            self._bind_target(target, node.value, values)

    def _bind_target(self, target: ast.expr, value: ast.expr | None, values: list[Alternative] | None) -> None:
        if isinstance(target, ast.Name):
            if values is not None:
                self.scope.bind(target.id, values, self.reach)
        elif isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            whole = values[0].value if values is not None and len(values) == 1 and not same else None
            for index, element in enumerate(target.elts):
                if isinstance(whole, (VllmVersion, VersionDerived)) and not isinstance(element, ast.Starred):
                    number = version_expressions.item(whole, index) if isinstance(whole, VllmVersion) else whole
                    self._bind_target(element, None, [Alternative(number)])
                    continue
                part = value.elts[index] if same and isinstance(value, (ast.Tuple, ast.List)) else None
                self._bind_target(element, part, self.values(part) if part is not None else UNKNOWN_VALUE)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, None, UNKNOWN_VALUE)
        elif isinstance(target, ast.Attribute):
            if values is not None:
                self.set_attribute(target, value)
        elif isinstance(target, ast.Subscript):
            self._set_item(target, value)

    def _set_item(self, target: ast.Subscript, value: ast.expr | None) -> None:
        self.read_expression(target.slice)
        owner = self.single(target.value)
        key = self.string(target.slice)
        if isinstance(owner, Ref) and owner.path == "sys.modules":
            if key is not None and self.is_vllm_path(key):
                self.record(ModuleFact(self.place(target), key))
            return
        namespace_owners = self.namespace_of(target.value)
        if namespace_owners:
            self.set_in_namespace(namespace_owners, key, target)
            return
        self.read_expression(target.value)
        if isinstance(owner, Literal) and isinstance(owner.node, ast.Dict) and value is not None:
            owner.more.append((target.slice, value))
        if isinstance(owner, Ref):
            self.set_item_of(owner, key, target)
        else:
            self.set_item_of_mapping(target)

    # --- loops

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self.read_expression(node.iter)
        iterations = self._iterations(node.iter)
        cost = sum(1 for _ in statements_in(node.body)) * len(iterations) if iterations else 0
        if iterations and self._unrolled + cost <= _MAX_UNROLLED_STATEMENTS and isinstance(node, ast.For):
            self._unrolled += cost
            for element in iterations:
                self._bind_iteration(node.target, element)
                self.read_block(node.body)
        else:
            for name in bound_names(node.target):
                self.scope.bind(name, UNKNOWN_VALUE, self.reach)
            self._read_branch(node.body, self.new_unknown())
        self._read_branch(node.orelse, self.new_unknown())

    def _iterations(self, iterated: ast.expr) -> list[tuple[list[Alternative], ...]]:
        """Returns what each iteration of a loop over a literal binds: an element, or key and value.

        Returns an empty list for a loop over anything else.
        """
        pairs = False
        keys_only = False
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute) and not iterated.args:
            if iterated.func.attr not in ("items", "keys", "values"):
                return []
            pairs, keys_only = iterated.func.attr == "items", iterated.func.attr == "keys"
            literal = self.single(iterated.func.value)
            if not isinstance(literal, Literal) or not isinstance(literal.node, ast.Dict):
                return []
        else:
            found = self.single(iterated)
            if not isinstance(found, Literal):
                return []
            literal = found
            keys_only = isinstance(literal.node, ast.Dict)
        items = literal.pairs()
        if not 0 < len(items) <= _MAX_UNROLLED_ITERATIONS or any(isinstance(v, ast.Starred) for _, v in items):
            return []
        if isinstance(literal.node, ast.Dict) and any(key is None for key, _ in items):
            return []
        iterations: list[tuple[list[Alternative], ...]] = []
        outer = self.scope, self.reach
        self.scope, self.reach = literal.scope, literal.reach
        for key, value in items:
            if pairs:
                iterations.append((self.values(key), self.values(value)))
            else:
                iterations.append((self.values(key if keys_only else value),))
        self.scope, self.reach = outer
        return iterations

    def _bind_iteration(self, target: ast.expr, element: tuple[list[Alternative], ...]) -> None:
        if len(element) == 1:
            value = element[0][0].value if len(element[0]) == 1 else None
            if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, Literal):
                parts = [part for _, part in value.pairs()]
                if len(parts) == len(target.elts):
                    for name, part in zip(target.elts, parts, strict=True):
                        self._bind_target(name, part, self.values(part))
                    return
            if isinstance(target, ast.Name):
                self.scope.bind(target.id, element[0], self.reach)
                return
        elif isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == len(element):
            for name, values in zip(target.elts, element, strict=True):
                if isinstance(name, ast.Name):
                    self.scope.bind(name.id, values, self.reach)
                else:
                    self._bind_target(name, None, UNKNOWN_VALUE)
            return
        for bound in bound_names(target):
            self.scope.bind(bound, UNKNOWN_VALUE, self.reach)
