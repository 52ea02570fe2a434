"""Declares the rules of the auditor: what each one reports, how severe it is, and the remedy.

The rules' documentation and their SARIF descriptions are generated from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """Grades how severe a finding is, in ascending order."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    @property
    def word(self) -> str:
        """Returns the severity as reports print it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rule:
    """Describes one kind of finding."""

    id: str
    name: str
    severity: Severity
    """Severity of a certain finding. It is lower behind a guard and where the source leaves doubt."""
    summary: str
    explanation: str
    remedy: str


_RULES = (
    Rule(
        "BP101",
        "missing-module",
        Severity.ERROR,
        "The plugin imports a module that this vLLM does not have.",
        "The import raises ModuleNotFoundError. A module that only some builds of vLLM have (compiled extensions, "
        "vendored kernels) is reported as BP901 instead.",
        "import it from its current module, or guard the import by version",
    ),
    Rule(
        "BP102",
        "missing-symbol",
        Severity.ERROR,
        "The plugin imports a name from a vLLM module that does not define it.",
        "The import raises ImportError. A name that upstream binds only under TYPE_CHECKING does not exist at run "
        "time.",
        "import it from its current module, or guard the import by version",
    ),
    Rule(
        "BP103",
        "missing-attribute",
        Severity.ERROR,
        "The plugin reads an attribute that a vLLM module or class does not have.",
        "Reading it raises AttributeError. Reported only if the source of every base class is known.",
        "use its replacement, or guard the access with hasattr or by version",
    ),
    Rule(
        "BP104",
        "missing-path",
        Severity.WARNING,
        "A string names a class or function that this vLLM does not have.",
        "vLLM takes classes by dotted name in many places (worker_cls, get_attn_backend_cls). Such a string fails when "
        "it is first used.",
        "name the class by its current module",
    ),
    Rule(
        "BP201",
        "assignment-creates-attribute",
        Severity.ERROR,
        "An assignment onto a vLLM module or class creates an attribute instead of replacing one.",
        "Nothing in vLLM reads the new attribute, so the patch has no effect and raises no error. It is a note if the "
        "plugin itself reads the attribute, as with a saved original. The rule also reports an assignment to a class "
        "whose instances each set the attribute when they are constructed: theirs hides the one of the class.",
        "patch its replacement, or remove the patch",
    ),
    Rule(
        "BP202",
        "target-changed",
        Severity.WARNING,
        "The source of something that the plugin replaces changed between two of the given versions.",
        "Comments, docstrings and layout are not compared. --diff shows the change.",
        "compare the replacement with the new upstream source",
    ),
    Rule(
        "BP301",
        "registration-matches-nothing",
        Severity.ERROR,
        "A registration names something that vLLM never looks up.",
        "register_oot is keyed by class name, so a name that no upstream class has replaces nothing. The same holds "
        "for Triton kernels that are registered by path. It is a warning if the class exists but does not look up "
        "replacements.",
        "register under the name of the upstream class",
    ),
    Rule(
        "BP302",
        "registered-path-missing",
        Severity.WARNING,
        "A string names a class or function that the plugin itself does not have.",
        "vLLM imports registered classes by name when it first needs them.",
        "correct the path",
    ),
    Rule(
        "BP401",
        "override-signature",
        Severity.ERROR,
        "A method overrides a vLLM method, and its signature does not accept every call that upstream's accepts.",
        "It is an error if every call fails, and a warning if only calls that use an optional argument or an "
        "argument's name fail. Constructors are not compared.",
        "accept the arguments that the upstream method accepts",
    ),
    Rule(
        "BP402",
        "override-of-nothing",
        Severity.WARNING,
        "A method overrides an upstream method that no longer exists.",
        "Another of the given versions has the upstream method and this one does not, or the method is marked "
        "@override and no base class has it. vLLM no longer calls it.",
        "override its replacement, or remove the method",
    ),
    Rule(
        "BP403",
        "missing-inherited-method",
        Severity.ERROR,
        "A method reads from super() an attribute that no base class has.",
        "Reading it raises AttributeError. Reported only if the source of every base class is known.",
        "call its replacement",
    ),
    Rule(
        "BP404",
        "inherited-attribute-gone",
        Severity.WARNING,
        "A subclass of a vLLM class reads an inherited attribute that another of the given versions has and this one "
        "does not.",
        "Reading it raises AttributeError unless something else sets the attribute.",
        "use its replacement",
    ),
    Rule(
        "BP501",
        "entry-point",
        Severity.ERROR,
        "An entry point names a module or object that is not in the plugin, or a plugin group that vLLM does not load.",
        "vLLM skips a platform plugin that cannot be loaded, and logs that at debug level only.",
        "correct the entry point",
    ),
    Rule(
        "BP601",
        "unknown-variable",
        Severity.WARNING,
        "The plugin uses a VLLM_* environment variable that this vLLM does not define.",
        "Setting it has no effect. Reading it from vllm.envs raises AttributeError and is an error. It is a note if "
        "the plugin reads the variable itself: at start-up, vLLM warns about undefined variables that have its prefix.",
        "use the variable that replaced it, or another prefix for the plugin's own variables",
    ),
    Rule(
        "BP901",
        "unresolved",
        Severity.NOTE,
        "The source alone does not decide whether this works.",
        "The reason is a name that is computed at run time, a module that depends on the build, or a base class "
        "outside vLLM.",
        "check it by hand",
    ),
    Rule(
        "BP902",
        "unreadable",
        Severity.WARNING,
        "A file could not be read and was not audited.",
        "It is malformed Python, has another encoding, is too large, is a broken link, or took too long to analyse. A "
        "damaged file of vLLM is reported too.",
        "repair the file, or leave it out with --exclude",
    ),
)

RULES = {rule.id: rule for rule in _RULES}
