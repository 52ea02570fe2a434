"""Decides whether a plugin reads an attribute that it sets on an object of vLLM.

If it does, the assignment is for the plugin's own use. Another object may have an attribute of the same name, so only
these reads count: from the class or module itself, from objects that are known to be its instances, and from the
parameters of functions that are passed such an object.
"""

from __future__ import annotations

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.upstream.symbols import Resolution


def is_read(context: Context, number: int, owner: Resolution, attribute: str) -> bool | None:
    """Returns whether the plugin reads the attribute that the fact of that number sets on `owner`.

    Returns None if the plugin reads an attribute of that name from an object that the auditor could not determine.
    """
    answer: bool | None = False
    for path in _owners_read_later(context, number, attribute):
        if _shares_attributes(context, path, owner, attribute):
            return True
    for kind, name in context.plugin.reads.get(attribute, ()):
        found = _reads_from(context, kind, name, owner, attribute)
        if found:
            return True
        if found is None and owner.is_class:
            answer = None
    return answer


def _owners_read_later(context: Context, number: int, attribute: str) -> list[str]:
    """Returns the dotted names of the objects that the attribute is read from by its full name, once it is set."""
    return [
        meaning.ref.path.rpartition(".")[0]
        for file, at, fact in context.plugin.uses.get(attribute, ())
        if file != context.file or at > number
        for meaning in fact.meanings
    ]


def _reads_from(context: Context, kind: str, name: str, owner: Resolution, attribute: str) -> bool | None:
    """Returns whether a read, of the kind and from the dotted name that `FileFacts.reads` records, is from `owner`."""
    if kind == "object":
        found = _shares_attributes(context, name, owner, attribute)
        # If methods of a plugin class are assigned to a vLLM class, their self is an instance of the vLLM class.
        operands = context.target.operands_of_classes.get(name, frozenset()) if found is None else frozenset()
        return True if any(_shares_attributes(context, path, owner, attribute) for path in operands) else found
    if kind == "parameter":
        operands = context.target.operands_of_functions.get(name, frozenset())
        answers = [_shares_attributes(context, path, owner, attribute) for path in operands]
        return True if True in answers else None
    return None


def _shares_attributes(context: Context, path: str, owner: Resolution, attribute: str) -> bool | None:
    """Returns whether the object of that dotted name, or an instance of it, has the attributes of `owner`."""
    found = context.target.find(Ref(path))
    if found.is_module:
        return owner.is_module and found.module == owner.module
    ancestors = context.target.index.ancestors(found.module, found.qualname) if found.is_class else None
    if ancestors is None:
        return None
    if any((module, name) == (owner.module, owner.qualname) for module, name, _ in ancestors.classes):
        return True
    is_in_vllm = any(module.partition(".")[0] == "vllm" for module, _, _ in ancestors.classes)
    has_its_own = any(attribute in body.members for _, _, body in ancestors.classes)
    # A class without vLLM bases may be a mixin for one that has them.
    return False if is_in_vllm or has_its_own else None
