"""Defines the facts that the auditor records about a plugin file: each use of vLLM, with its line and conditions.

Facts outlive the syntax tree they were read from. A file is parsed once, and its facts are checked against each vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_patchbay.audit.conditions import Condition, Reach, Ref
from vllm_patchbay.upstream.modules import Symbol


@dataclass(frozen=True, slots=True)
class Catch:
    """Describes an enclosing try statement that catches exceptions without raising them again."""

    exceptions: frozenset[str]
    has_alternative: bool
    """Whether a handler imports an alternative."""


@dataclass(frozen=True, slots=True)
class Place:
    """Describes a position in a file, when it is reached, and the exceptions that are caught there."""

    line: int
    column: int
    reach: Reach = ()
    caught: tuple[Catch, ...] = ()
    """Enclosing try statements, innermost last."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """Names one object that a name may refer to, and the conditions under which it does."""

    ref: Ref
    reach: Reach = ()


Meanings = tuple[Meaning, ...]


@dataclass(frozen=True, slots=True)
class ImportFact:
    """Records that the plugin imports a module of vLLM, or a name from one."""

    place: Place
    module: str
    name: str = ""
    """The imported name in ``from module import name``; empty for an import of the module."""


@dataclass(frozen=True, slots=True)
class UseFact:
    """Records that the plugin reads an attribute of a vLLM module, class or function."""

    place: Place
    meanings: Meanings
    """Dotted names that the attribute may have."""


@dataclass(frozen=True, slots=True)
class PatchFact:
    """Records that the plugin sets an attribute of a vLLM module, class or function."""

    place: Place
    owners: Meanings
    attribute: str
    may_create: bool = False
    """Whether the call allows an attribute that does not exist (``create=True``, ``raising=False``)."""
    is_plain: bool = False
    """Whether the value is a literal or a function, so that it cannot be a descriptor that instances respect."""


@dataclass(frozen=True, slots=True)
class CallFact:
    """Records that the plugin passes a vLLM object to its function in another file, which may set an attribute."""

    place: Place
    function: str
    arguments: tuple[tuple[Meanings, str | None, Place], ...]
    """For each argument: the objects it may be, its value if it is a string, and the position of that string."""


@dataclass(frozen=True, slots=True)
class RegisterFact:
    """Records that the plugin calls ``owner.register_oot``, which replaces a vLLM class by name."""

    place: Place
    owners: Meanings
    name: str = ""
    """The given class name; empty if vLLM takes the owner's."""


@dataclass(frozen=True, slots=True)
class KernelFact:
    """Records that the plugin replaces a Triton kernel by its dotted path."""

    place: Place
    path: str


@dataclass(frozen=True, slots=True)
class PathFact:
    """Records that a string literal of the plugin is the path of a class or function."""

    place: Place
    module: str
    """Module part of ``module:name``; empty if the path has dots only, and the whole path is in `name`."""
    name: str

    @property
    def path(self) -> str:
        """Returns the path as the plugin writes it."""
        return f"{self.module}:{self.name}" if self.module else self.name


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Describes a method or property that a class of the plugin defines."""

    symbol: Symbol
    line: int
    """Line of the def statement, below its decorators."""
    column: int
    marked_override: bool = False


@dataclass(frozen=True, slots=True)
class NamedUse:
    """Describes a read of ``super().name`` or ``self.name``."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class ClassFact:
    """Records that the plugin defines a class."""

    place: Place
    name: str
    bases: tuple[Meanings, ...]
    """For each base, the classes that it may be; empty if that is unknown."""
    methods: tuple[MethodInfo, ...]
    own: frozenset[str]
    """Attributes that the class binds in its body, or that its methods set on ``self``."""
    super_uses: tuple[NamedUse, ...] = ()
    self_reads: tuple[NamedUse, ...] = ()


@dataclass(frozen=True, slots=True)
class VariableFact:
    """Records that the plugin reads or sets a ``VLLM_*`` environment variable."""

    place: Place
    name: str
    is_written: bool


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """Records that the plugin assigns to ``sys.modules[module]``."""

    place: Place
    module: str


@dataclass(frozen=True, slots=True)
class UnresolvedFact:
    """Records that the plugin uses vLLM in a way that the source does not decide. `what` is the finding's message."""

    place: Place
    what: str


Fact = (
    ImportFact
    | UseFact
    | PatchFact
    | CallFact
    | RegisterFact
    | KernelFact
    | PathFact
    | ClassFact
    | VariableFact
    | ModuleFact
    | UnresolvedFact
)


@dataclass(slots=True)
class FileFacts:
    """Holds all that the auditor records about one file."""

    file: str
    facts: list[Fact] = field(default_factory=list)
    attributes_read: set[str] = field(default_factory=set)
    """Names of attributes that are read from objects other than those known to be vLLM's."""
    reads: set[tuple[str, str, str]] = field(default_factory=set)
    """Attributes that are read, each as (attribute, kind, dotted name). The kind is "object" for a read from a class,
    its instance or a module of that name, "parameter" for a read from a parameter of the function of that name, or
    "unknown" with an empty name."""
    operands: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of dotted names: a function of the plugin, and a vLLM object that it is passed or assigned to. The function
    works on that object or on instances of it."""
    setters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Functions that set an attribute by name, by dotted name: the positions of the object and of the name among their
    parameters."""
    version_dependent: set[str] = field(default_factory=set)
    """Dotted names of this module's variables that are computed from vLLM's version, and of functions that read it."""
    attributes_set: set[str] = field(default_factory=set)
    variables_declared: set[str] = field(default_factory=set)
    """Environment variables that the plugin adds to vLLM's own table of them."""
    declared_by_constant: set[str] = field(default_factory=set)
    """The same, for a variable whose name is a constant of another module: the dotted name of the constant."""
    constants: dict[str, str] = field(default_factory=dict)
    """Constants of this module that hold names of environment variables, by dotted name."""
    variables_mentioned: set[str] = field(default_factory=set)
    """Environment variables whose names are passed to functions of the plugin, or are keys of a table that reads
    them."""
    names_registered: set[str] = field(default_factory=set)
    """Names that a registration may add to a vLLM class, such as the members of an enumeration."""
    classes: set[str] = field(default_factory=set)
    flags: dict[str, Condition] = field(default_factory=dict)
    """Conditions that this module stores in a variable, or that one of its functions returns, by dotted name."""
    unreadable: str = ""
    """Why the file was not audited; empty if it was."""
    unreadable_line: int = 0
