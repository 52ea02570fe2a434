"""Whether a plugin reads an attribute that it sets on something of vLLM: then the assignment is for its own use.

An attribute of the name on anything else says nothing. Counted are reads of the class or module itself, of instances of
it as far as they can be told, and of what a function is given that takes such an object.
"""

from __future__ import annotations

from vllm_patchbay.audit.checks.context import Context
from vllm_patchbay.audit.conditions import Ref
from vllm_patchbay.upstream.symbols import Resolution


def is_read(context: Context, number: int, owner: Resolution, attribute: str) -> bool | None:
    """By the plugin, from what was set by the fact of that number. None if the plugin reads the name from something
    that could not be followed."""
    answer: bool | None = False
    for path in _used_later(context, number, attribute):
        if _is_of(context, path, owner, attribute):
            return True
    for kind, key in context.plugin.reads.get(attribute, ()):
        found = _matches(context, kind, key, owner, attribute)
        if found:
            return True
        if found is None and owner.is_class:
            answer = None
    return answer


def _used_later(context: Context, number: int, attribute: str) -> list[str]:
    """Owners of the attribute where it is read by the full name, once it has been set."""
    return [
        meaning.ref.path.rpartition(".")[0]
        for file, at, fact in context.plugin.uses.get(attribute, ())
        if file != context.file or at > number
        for meaning in fact.meanings
    ]


def _matches(context: Context, kind: str, key: str, owner: Resolution, attribute: str) -> bool | None:
    if kind == "of":
        found = _is_of(context, key, owner, attribute)
        # A class of the plugin whose methods are put onto vLLM's runs with instances of vLLM's.
        given = context.target.lenders.get(key, frozenset()) if found is None else frozenset()
        return True if any(_is_of(context, path, owner, attribute) for path in given) else found
    if kind == "by":
        given = context.target.takers.get(key, frozenset())
        answers = [_is_of(context, path, owner, attribute) for path in given]
        return True if True in answers else None
    return None


def _is_of(context: Context, path: str, owner: Resolution, attribute: str) -> bool | None:
    """Whether what the path names, or an instance of it, has the attributes of the owner."""
    found = context.target.find(Ref(path))
    if found.is_module:
        return owner.is_module and found.module == owner.module
    line = context.target.index.ancestors(found.module, found.qualname) if found.is_class else None
    if line is None:
        return None
    if any((module, name) == (owner.module, owner.qualname) for module, name, _ in line.classes):
        return True
    is_of_vllm = any(module.partition(".")[0] == "vllm" for module, _, _ in line.classes)
    has_its_own = any(attribute in body.members for _, _, body in line.classes)
    # A class by itself may be mixed into one of vLLM's.
    return False if is_of_vllm or has_its_own else None
