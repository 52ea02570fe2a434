"""The rules: what is looked for, how bad it is, and what to do about it. The documentation is generated from here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    NOTE = 0
    WARNING = 1
    ERROR = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    name: str
    severity: Severity
    """Of a plain case. A guard around it, or doubt, lowers it."""
    summary: str
    explanation: str
    remedy: str


_RULES = (
    Rule(
        "BP101",
        "missing-module",
        Severity.ERROR,
        "A module of vLLM is imported that is not there.",
        "The import raises ModuleNotFoundError. Modules that exist only in some builds of vLLM (compiled "
        "ones, vendored "
        "kernels) are BP901.",
        "import it from where it is now, or guard the import by version",
    ),
    Rule(
        "BP102",
        "missing-symbol",
        Severity.ERROR,
        "A name is imported from a module of vLLM that does not have it.",
        "The import raises ImportError. A name that upstream binds only under TYPE_CHECKING is not there at run time.",
        "import it from where it is now, or guard the import by version",
    ),
    Rule(
        "BP103",
        "missing-attribute",
        Severity.ERROR,
        "An attribute of a vLLM module or class is read that is not there.",
        "Reading it raises AttributeError. Reported only where the whole inheritance of the class is known.",
        "use what replaced it, or guard the access with hasattr or by version",
    ),
    Rule(
        "BP104",
        "missing-path",
        Severity.WARNING,
        "A string names a class or function of vLLM that is not there.",
        "vLLM takes classes by dotted name in many places (worker_cls, get_attn_backend_cls); such a "
        "string fails when it "
        "is first used.",
        "name the class where it is now",
    ),
    Rule(
        "BP201",
        "assignment-creates-attribute",
        Severity.ERROR,
        "An assignment onto a vLLM module or class creates an attribute instead of replacing one.",
        "Nothing in vLLM reads the new attribute, so the patch does nothing, in silence. A note where the plugin reads "
        "the attribute itself, as with a saved original. The same where every instance sets the attribute for itself "
        "when it is made, which hides what the class has.",
        "patch what replaced it, or remove the patch",
    ),
    Rule(
        "BP202",
        "target-changed",
        Severity.WARNING,
        "The source of something the plugin replaces changed between two of the given versions.",
        "Comments, docstrings and layout do not count. --diff shows the change.",
        "compare the replacement with the new upstream source",
    ),
    Rule(
        "BP301",
        "registration-matches-nothing",
        Severity.ERROR,
        "A registration names something that vLLM never looks up.",
        "register_oot is keyed by class name: a name that no upstream class has registers a replacement for nothing. "
        "The same holds for Triton kernels registered by path. A warning where the class exists and does not ask for "
        "replacements.",
        "register under the name of the upstream class",
    ),
    Rule(
        "BP302",
        "registered-path-missing",
        Severity.WARNING,
        "A string names something in the plugin itself that is not there.",
        "vLLM imports registered classes by name when they are first needed.",
        "correct the path",
    ),
    Rule(
        "BP401",
        "override-signature",
        Severity.ERROR,
        "A method overrides one of vLLM's and cannot be called the way upstream's is declared.",
        "An error if every call fails, a warning if only calls that use an optional argument or an argument's name do. "
        "Constructors are not compared.",
        "accept what upstream's method accepts",
    ),
    Rule(
        "BP402",
        "override-of-nothing",
        Severity.WARNING,
        "A method overrides one that is gone.",
        "The upstream method exists in one of the given versions and not in this one, or the method is "
        "marked @override; "
        "vLLM does not call it any more.",
        "override what replaced it, or remove the method",
    ),
    Rule(
        "BP403",
        "missing-inherited-method",
        Severity.ERROR,
        "super() is asked for a method that no base class has.",
        "The call raises AttributeError. Reported only where the whole inheritance is known.",
        "call what replaced it",
    ),
    Rule(
        "BP404",
        "inherited-attribute-gone",
        Severity.WARNING,
        "A subclass of a vLLM class reads an attribute of itself that upstream had in one of the given "
        "versions and has "
        "no more.",
        "Reading it raises AttributeError unless something else sets it.",
        "use what replaced it",
    ),
    Rule(
        "BP501",
        "entry-point",
        Severity.ERROR,
        "An entry point names a module or object that is not in the plugin, or a plugin group that vLLM does not load.",
        "vLLM skips a platform plugin that cannot be loaded with a message at debug level only.",
        "correct the entry point",
    ),
    Rule(
        "BP601",
        "unknown-variable",
        Severity.WARNING,
        "A VLLM_* variable is used that this vLLM does not know.",
        "Setting it has no effect; reading it from vllm.envs raises AttributeError (then it is an error). "
        "A note where the "
        "plugin reads it itself: vLLM warns at start-up about variables with its prefix that it does not know.",
        "use the variable that replaced it, or another prefix for the plugin's own",
    ),
    Rule(
        "BP901",
        "unresolved",
        Severity.NOTE,
        "It could not be told from source whether this works.",
        "A name computed at run time, a module that depends on the build, a base class outside vLLM.",
        "look at it yourself",
    ),
    Rule(
        "BP902",
        "unreadable",
        Severity.WARNING,
        "A file could not be read, and was left out.",
        "Malformed Python, another encoding, too large, a link that leads nowhere, or too slow to analyse. Also a file "
        "of vLLM itself that is damaged.",
        "repair or --exclude it",
    ),
)

RULES = {rule.id: rule for rule in _RULES}
