"""What a plugin's file does with vLLM, as values that outlive its syntax tree and are checked against each vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_patchbay.audit.conditions import Condition, Reach, Ref
from vllm_patchbay.upstream.modules import Symbol


@dataclass(frozen=True, slots=True)
class Catch:
    """An enclosing try statement that would swallow an exception."""

    exceptions: frozenset[str]
    has_alternative: bool
    """The handler tries something else, instead of going without."""


@dataclass(frozen=True, slots=True)
class Place:
    line: int
    column: int
    reach: Reach = ()
    caught: tuple[Catch, ...] = ()
    """Innermost last."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One thing that a name may stand for where it is used."""

    ref: Ref
    reach: Reach = ()


Meanings = tuple[Meaning, ...]


@dataclass(frozen=True, slots=True)
class ImportFact:
    place: Place
    module: str
    name: str = ""
    """Of ``from module import name``."""


@dataclass(frozen=True, slots=True)
class UseFact:
    """An attribute of something of vLLM is read."""

    place: Place
    meanings: Meanings


@dataclass(frozen=True, slots=True)
class PatchFact:
    """An attribute of something of vLLM is set."""

    place: Place
    owners: Meanings
    attribute: str
    may_create: bool = False
    """The call says that the attribute need not exist."""
    is_plain: bool = False
    """The value is written out, or a function: no descriptor that would answer for instances."""


@dataclass(frozen=True, slots=True)
class CallFact:
    """A function of another file of the plugin is given something of vLLM and a name; it may be one that sets an
    attribute."""

    place: Place
    function: str
    arguments: tuple[tuple[Meanings, str | None, Place], ...]
    """Of each: what it may stand for, the string it is, and where that is written."""


@dataclass(frozen=True, slots=True)
class RegisterFact:
    """``owner.register_oot``. Without a name, the owner's own is used."""

    place: Place
    owners: Meanings
    name: str = ""


@dataclass(frozen=True, slots=True)
class KernelFact:
    """A Triton kernel is replaced by its path."""

    place: Place
    path: str


@dataclass(frozen=True, slots=True)
class PathFact:
    """A string that names a class or function."""

    place: Place
    module: str
    """Empty if the path does not tell module and name apart."""
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}:{self.name}" if self.module else self.name


@dataclass(frozen=True, slots=True)
class MethodInfo:
    symbol: Symbol
    line: int
    """Of the name, below its decorators."""
    column: int
    marked_override: bool = False


@dataclass(frozen=True, slots=True)
class NamedUse:
    """``super().name`` or ``self.name``."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class ClassFact:
    place: Place
    name: str
    bases: tuple[Meanings, ...]
    """Empty meanings for a base that could not be followed."""
    methods: tuple[MethodInfo, ...]
    own: frozenset[str]
    """Everything the class itself binds or sets on itself."""
    super_uses: tuple[NamedUse, ...] = ()
    self_reads: tuple[NamedUse, ...] = ()


@dataclass(frozen=True, slots=True)
class VariableFact:
    place: Place
    name: str
    is_written: bool


@dataclass(frozen=True, slots=True)
class ModuleFact:
    """``sys.modules[module] = …``."""

    place: Place
    module: str


@dataclass(frozen=True, slots=True)
class UnresolvedFact:
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
    file: str
    facts: list[Fact] = field(default_factory=list)
    attributes_read: set[str] = field(default_factory=set)
    """Names of attributes read from anything that is not known to be vLLM's."""
    reads: set[tuple[str, str, str]] = field(default_factory=set)
    """Attributes read: the name, and of what: "of" a class or module, "by" a function from what it is given, each with
    its dotted name, or "?"."""
    takes: set[tuple[str, str]] = field(default_factory=set)
    """Functions of the plugin, and what of vLLM they are given or put onto, by dotted name."""
    setters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Functions that set an attribute by name, by dotted name: the positions of object and name."""
    of_version: set[str] = field(default_factory=set)
    """Names of this module that are made of vLLM's version, and functions that look at it, by dotted name."""
    attributes_set: set[str] = field(default_factory=set)
    variables_declared: set[str] = field(default_factory=set)
    """Added to vLLM's own table of variables."""
    declared_by_constant: set[str] = field(default_factory=set)
    """The same, by the dotted name of a constant in another module."""
    constants: dict[str, str] = field(default_factory=dict)
    """Constants of this module that hold names of variables, by dotted name."""
    variables_mentioned: set[str] = field(default_factory=set)
    """Handed to functions of the plugin that read variables, or to a table of them."""
    names_registered: set[str] = field(default_factory=set)
    """Names that a registration may add to a vLLM class, such as the members of an enumeration."""
    classes: set[str] = field(default_factory=set)
    flags: dict[str, Condition] = field(default_factory=dict)
    """Conditions that this module keeps under a name, or that a function of it returns, by dotted name."""
    unreadable: str = ""
    """Why the file was left out."""
    unreadable_line: int = 0
