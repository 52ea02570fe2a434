"""Reads one file of a plugin into facts. The plugin is parsed and never imported.

Statements are followed in order, functions after the module that defines them, because that is when they run.
Loops over literals are unrolled: plugins register and patch from tables.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

from vllm_patchbay.audit import version_expressions as releases
from vllm_patchbay.audit.calls import Calls
from vllm_patchbay.audit.class_facts import class_fact
from vllm_patchbay.audit.conditions import Condition, Ran, Reach, Ref, TypeChecking, Unknown, negated
from vllm_patchbay.audit.expressions import imported
from vllm_patchbay.audit.facts import Catch, FileFacts, ImportFact, ModuleFact
from vllm_patchbay.audit.functions import GUARDED, catch_of, caught_by, examine
from vllm_patchbay.audit.scopes import (
    UNKNOWN_VALUE,
    Alternative,
    Instance,
    Literal,
    Parameter,
    Perhaps,
    Release,
    Scope,
    Skip,
    Versioned,
)
from vllm_patchbay.audit.statement_forms import (
    annotations_of,
    arguments_of,
    defaults_of,
    is_static,
    leaves,
    only_imports,
    statements_in,
)
from vllm_patchbay.upstream.modules import absolute, bound_names, children, dotted, is_type_checking, walk

_LONGEST_UNROLLED = 256
_DEEPEST = 8000
_MOST_UNROLLED_STATEMENTS = 4096
_LONGEST_ANNOTATION = 200
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_file(file: str, source: str, module: str, is_package: bool, roots: frozenset[str]) -> FileFacts:
    """Raises what ast.parse raises for source that is not Python."""
    tree = ast.parse(source)
    reader = Reader(FileFacts(file), module, is_package, roots)
    reader.knows_version = "version" in source
    limit = sys.getrecursionlimit()
    # A long chain of elif is a deep tree. Not while parsing, which recurses on the stack of the machine.
    sys.setrecursionlimit(max(limit, _DEEPEST))
    try:
        reader.run(tree)
    finally:
        sys.setrecursionlimit(limit)
    return reader.result


class Reader(Calls):
    def __init__(self, result: FileFacts, module: str, is_package: bool, roots: frozenset[str]) -> None:
        super().__init__(result, module, roots)
        self.package = module if is_package else module.rpartition(".")[0]
        self._deferred: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, Scope, Reach]] = []
        self._annotations_run = True
        self._unrolled = 0

    def run(self, tree: ast.Module) -> None:
        self._annotations_run = not any(
            isinstance(statement, ast.ImportFrom)
            and statement.module == "__future__"
            and any(alias.name == "annotations" for alias in statement.names)
            for statement in tree.body
        )
        self.functions = examine(tree)
        self.helpers = self.functions.helpers
        self.own_functions = {statement.name: statement for statement in tree.body if isinstance(statement, _FUNCTION)}
        self.block(tree.body)
        self.note_constants()
        while self._deferred:
            function, scope, reach = self._deferred.pop(0)
            self.scope, self.reach, self.caught = scope, reach, ()
            if isinstance(function, ast.Lambda):
                self.expression(function.body)
            else:
                if scope.parent is not None and scope.parent.parent is None:
                    self.caught = self.functions.caught.get(function.name, ())
                self.block(function.body)

    # --- statements

    def block(self, statements: Iterable[ast.stmt]) -> None:
        """What follows a statement that leaves the block under a condition runs only under its opposite."""
        outer = self.reach
        for statement in statements:
            rest = self.statement(statement)
            if rest:
                self.reach = (*self.reach, *rest)
        self.reach = outer

    def statement(self, node: ast.stmt) -> Reach:
        """Reads one statement; returns what holds for those that follow it in the block."""
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
            self.expression(node.test)
            self._branch(node.body, self.condition(node.test))
            self._branch(node.orelse, self.new_unknown())
        elif isinstance(node, ast.Match):
            self._match(node)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                self.scope.elsewhere[name] = self.scope.module_scope()
        else:
            for child in children(node):
                if isinstance(child, ast.expr):
                    self.expression(child)
        return ()

    def _branch(self, statements: list[ast.stmt], *conditions: Condition) -> None:
        outer = self.reach
        self.reach = (*outer, *conditions)
        self.block(statements)
        self.reach = outer

    def _if(self, node: ast.If) -> Reach:
        if is_type_checking(node.test):
            self._branch(node.body, TypeChecking())
            self.block(node.orelse)
            return ()
        self.expression(node.test)
        test = self.condition(node.test)
        self._branch(node.body, test)
        self._branch(node.orelse, negated(test))
        if isinstance(test, Unknown) and not test.is_guard and not test.names:
            # Ordinary control flow: kept for what follows, it would only grow with the length of the function.
            return ()
        if leaves(node.body):
            return (negated(test),)
        return (test,) if node.orelse and leaves(node.orelse) else ()

    def _match(self, node: ast.Match) -> None:
        self.expression(node.subject)
        subject = self.single(node.subject)
        earlier: tuple[Condition, ...] = ()
        for case in node.cases:
            for part in walk(case.pattern):
                if isinstance(part, ast.expr) and not isinstance(part, ast.Constant):
                    self.expression(part)
            found = releases.matched(subject, case.pattern) if isinstance(subject, Release) else None
            test = found or self.new_unknown(is_guard=isinstance(subject, (Release, Versioned)))
            conditions = [*earlier, test]
            if case.guard is not None:
                self.expression(case.guard)
                conditions.append(self.condition(case.guard))
            elif found is not None:
                earlier = (*earlier, negated(found))
            self._branch(case.body, *conditions)

    def _try(self, node: ast.Try | ast.TryStar) -> Reach:
        outer = self.caught
        self.caught = (*outer, *catch_of(node))
        start = len(self.result.facts)
        self.block(node.body)
        self.caught = outer
        everything = frozenset().union(*map(caught_by, node.handlers)) & GUARDED
        ran: Condition = (
            Ran(start, len(self.result.facts), everything, only_imports(node.body))
            if everything
            else self.new_unknown()
        )
        for handler in node.handlers:
            if handler.type is not None:
                self.expression(handler.type)
            if handler.name:
                self.scope.bind(handler.name, UNKNOWN_VALUE, (*self.reach, negated(ran)))
            self._branch(handler.body, negated(ran))
        self._branch(node.orelse, ran)
        self.block(node.finalbody)
        return (ran,) if node.handlers and all(leaves(handler.body) for handler in node.handlers) else ()

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        outer = self.caught
        for item in node.items:
            self.expression(item.context_expr)
            call = item.context_expr
            if isinstance(call, ast.Call) and dotted(call.func).rpartition(".")[2] in ("suppress", "raises"):
                caught = frozenset(dotted(argument).rpartition(".")[2] for argument in call.args)
                if caught & GUARDED:
                    # Where a test asks for the exception, it is not a fault that it comes.
                    self.caught = (*self.caught, Catch(caught, dotted(call.func).endswith("raises")))
            if item.optional_vars is not None:
                for name in bound_names(item.optional_vars):
                    self.scope.bind(name, UNKNOWN_VALUE, self.reach)
        self.block(node.body)
        self.caught = outer

    # --- imports

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self.is_of_vllm(alias.name):
                    self.fact(ImportFact(self.place(node), alias.name))
                name = alias.asname or alias.name.partition(".")[0]
                self.scope.bind(name, [Alternative(Ref(alias.name if alias.asname else name))], self.reach)
            return
        module = absolute(self.package, node.level, node.module)
        for alias in node.names:
            if self.is_of_vllm(module):
                self.fact(ImportFact(self.place(alias), module, "" if alias.name == "*" else alias.name))
            if alias.name == "*":
                self.scope.module_scope().starred.append(module)
            else:
                value = imported(f"{module}.{alias.name}")
                self.scope.bind(alias.asname or alias.name, [Alternative(value)], self.reach)

    # --- definitions

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.decorators(node)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.expression(default)
        if self._annotations_run:
            for annotation in annotations_of(node):
                self.expression(annotation)
        self.scope.bind(node.name, UNKNOWN_VALUE, self.reach)
        outer = self.reach
        self.reach = (*outer, *self._skipped(node))
        scope = Scope(self._enclosing(), base=self.reach)
        scope.function = scope.function or ".".join([self.module, *self.scope.instances[:1], node.name])
        for argument in arguments_of(node.args):
            scope.bind(argument.arg, self._given(argument, scope), self.reach)
        if self.scope.is_class and node.args.args and not is_static(node):
            scope.bind(node.args.args[0].arg, [Alternative(Instance(self.scope.instances))], self.reach)
        for name, default in defaults_of(node.args):
            perhaps = [Alternative(Perhaps(m.ref.path)) for m in self.meanings(default) if m.ref.root == "vllm"]
            if perhaps:
                scope.bind(name, perhaps, self.reach)
        self._deferred.append((node, scope, self.reach))
        self.reach = outer

    def _skipped(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Reach:
        """When a test runs, by the marks on it and on its file."""
        marks = [alternative for decorator in node.decorator_list for alternative in self.values(decorator)]
        if self.scope.parent is None and node.name.lower().startswith("test"):
            of_file = self.single(ast.Name("pytestmark", ast.Load()))
            elements = of_file.pairs() if isinstance(of_file, Literal) else []
            marks += [Alternative(of_file), *(a for _, element in elements for a in self.values(element))]
        return tuple(mark.value.runs for mark in marks if isinstance(mark.value, Skip))

    def _given(self, argument: ast.arg, scope: Scope) -> list[Alternative]:
        paths = tuple(self._annotated(argument.annotation)) if argument.annotation is not None else ()
        return [Alternative(Instance(paths) if paths else Parameter(scope.function))]

    def _annotated(self, node: ast.expr) -> Iterator[str]:
        """The classes of vLLM or of the plugin that an annotation names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < _LONGEST_ANNOTATION:
            try:
                yield from self._annotated(ast.parse(node.value.strip(), mode="eval").body)
            except SyntaxError:
                return
        elif isinstance(node, ast.BinOp):
            yield from self._annotated(node.left)
            yield from self._annotated(node.right)
        elif isinstance(node, ast.Subscript):
            if dotted(node.value).rpartition(".")[2] in ("Optional", "type", "Type"):
                yield from self._annotated(node.slice)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            yield from (meaning.ref.path for meaning in self.meanings(node))

    def lambda_expression(self, node: ast.Lambda) -> None:
        scope = Scope(self._enclosing(), base=self.reach)
        scope.function = self.lambda_name(node)
        for argument in arguments_of(node.args):
            scope.bind(argument.arg, [Alternative(Parameter(scope.function))], self.reach)
        self._deferred.append((node, scope, self.reach))

    def _enclosing(self) -> Scope:
        # The names of a class are not visible in its methods, but those around it are.
        return self.scope.parent if self.scope.is_class and self.scope.parent is not None else self.scope

    def _class(self, node: ast.ClassDef) -> None:
        self.decorators(node)
        for base in node.bases:
            self.expression(base)
        for keyword in node.keywords:
            self.expression(keyword.value)
        bases = tuple(self.meanings(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
        self.fact(class_fact(node, bases, self.package, self.place(node), self.place))
        self.result.classes.add(node.name)
        own = Ref(f"{self.module}.{node.name}")
        is_global = self.scope.parent is None
        self.scope.bind(node.name, [Alternative(own)] if is_global else UNKNOWN_VALUE, self.reach)
        outer, reach = self.scope, self.reach
        self.reach = (*reach, *self._skipped(node))
        self.scope = Scope(outer, base=self.reach, is_class=True)
        of_bases = (meaning.ref.path for meanings in bases for meaning in meanings)
        self.scope.instances = (own.path,) if is_global else tuple(of_bases)
        self.block(node.body)
        self.scope, self.reach = outer, reach

    # --- assignments

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        if node.value is not None:
            self.expression(node.value)
        if isinstance(node, ast.AnnAssign) and self._annotations_run:
            self.expression(node.annotation)
        if isinstance(node, ast.AugAssign):
            if isinstance(node.op, ast.BitOr):
                self.merged(node.target, node.value)
            self.read_then_set(node.target)
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
                if isinstance(whole, (Release, Versioned)) and not isinstance(element, ast.Starred):
                    number = releases.unpacked(whole, index) if isinstance(whole, Release) else whole
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
        self.expression(target.slice)
        owner = self.single(target.value)
        key = self.string(target.slice)
        if isinstance(owner, Ref) and owner.path == "sys.modules":
            if key is not None and self.is_of_vllm(key):
                self.fact(ModuleFact(self.place(target), key))
            return
        of = self.namespace_of(target.value)
        if of:
            self.set_in_namespace(of, key, target)
            return
        self.expression(target.value)
        if isinstance(owner, Literal) and isinstance(owner.node, ast.Dict) and value is not None:
            owner.more.append((target.slice, value))
        if isinstance(owner, Ref):
            self.set_item_of(owner, key, target)
        else:
            self.set_item_of_anything(target)

    # --- loops

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self.expression(node.iter)
        rounds = self._rounds(node.iter)
        cost = sum(1 for _ in statements_in(node.body)) * len(rounds) if rounds else 0
        if rounds and self._unrolled + cost <= _MOST_UNROLLED_STATEMENTS and isinstance(node, ast.For):
            self._unrolled += cost
            for element in rounds:
                self._bind_round(node.target, element)
                self.block(node.body)
        else:
            for name in bound_names(node.target):
                self.scope.bind(name, UNKNOWN_VALUE, self.reach)
            self._branch(node.body, self.new_unknown())
        self._branch(node.orelse, self.new_unknown())

    def _rounds(self, iterated: ast.expr) -> list[tuple[list[Alternative], ...]]:
        """What each round of a loop over a literal binds: an element, or key and value. Empty if it is not one."""
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
        if not 0 < len(items) <= _LONGEST_UNROLLED or any(isinstance(v, ast.Starred) for _, v in items):
            return []
        if isinstance(literal.node, ast.Dict) and any(key is None for key, _ in items):
            return []
        rounds: list[tuple[list[Alternative], ...]] = []
        outer = self.scope, self.reach
        self.scope, self.reach = literal.scope, literal.reach
        for key, value in items:
            if pairs:
                rounds.append((self.values(key), self.values(value)))
            else:
                rounds.append((self.values(key if keys_only else value),))
        self.scope, self.reach = outer
        return rounds

    def _bind_round(self, target: ast.expr, element: tuple[list[Alternative], ...]) -> None:
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
