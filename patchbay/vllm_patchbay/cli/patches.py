"""Implements the commands for patches: list, show, check, diff, docs, new and record.

``vllm-patchbay`` has them for the patches of any plugin. A plugin's command line can offer them for the plugin's own
patches (`PatchSelection`). None of the commands imports vLLM.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_patchbay.cli import output

if TYPE_CHECKING:
    from vllm_patchbay.patch import Guard, GuardedPackage, Patch, PatchSet
    from vllm_patchbay.upstream import SymbolIndex


@dataclass(frozen=True, slots=True)
class PatchSelection:
    """Selects the patches that the commands work on."""

    program: str = "vllm-patchbay"
    """Command line in front of the commands' names, for messages."""
    packages: Callable[[], Sequence[str]] | None = None
    """Returns the packages of patches, the plugin's own first; that one may be empty. With None, the user selects one
    by --package, or all announced packages are used."""
    guarded: str | None = None
    """Package whose source has guards. With None, it is all packages that announce theirs, or --package if that has a
    record of fingerprints."""


def add_commands(commands: Any, selection: PatchSelection) -> None:
    """Adds the commands to the subparsers of a command line. Each command sets ``run``."""

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, more: str = ""
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}".strip(), allow_abbrev=False
        )
        if selection.packages is None:
            selected = "to write the patch into" if run is _new else "of patches"
            default = "" if run is _new else " (default: all packages that installed distributions announce)"
            added.add_argument(
                "--package",
                metavar="PACKAGE",
                required=run is _new,
                help=f"package {selected}, such as my_plugin.patches{default}",
            )
        output.add_json_flag(added)
        added.set_defaults(run=run, selection=selection, parser=added)
        return added

    command("list", _list, "list all patches and guarded overrides with their targets")
    show = command(
        "show",
        _show,
        "show one patch and whether it fits a vLLM",
        "It prints every field of the declaration, the outcome of the check, and the fingerprint of the target.",
    )
    check = command(
        "check",
        _check,
        "verify all patches and guarded overrides against a vLLM",
        "The exit status is 1 if the target of a patch or guard is missing or changed, if a replacement does not fit, "
        "if a patch has expired, if this vLLM is later than its versions, or if its file cannot be loaded.",
    )
    record = command(
        "record",
        _record,
        "record the fingerprints of all guarded overrides for a vLLM",
        "Run it after 'check' has shown the differences and the code was adapted. The fingerprints of other releases "
        "are kept.",
    )
    diff = command(
        "diff",
        _diff,
        "compare the target of a patch with the source that the patch was written against",
        "The old source is downloaded if it is neither installed nor in the cache.",
    )
    for parser in (show, diff):
        parser.add_argument("name", metavar="NAME", help="name of the patch")
    docs = command("docs", _docs, "print a Markdown page that documents all patches")
    docs.add_argument("--output", type=Path, metavar="FILE", help="write the page to a file instead of stdout")
    new = command(
        "new",
        _new,
        "write the skeleton of a patch, its unit test and its end-to-end test",
        "The fingerprint, the versions and the signature come from the vLLM. No file is overwritten.",
    )
    new.add_argument("target", metavar="MODULE:NAME", help="target, such as vllm.config.model:ModelConfig.verify")
    new.add_argument(
        "--process",
        choices=("platform", "engine", "worker"),
        required=True,
        help="process that needs the patch: every process (platform), the engine core, or the workers",
    )
    new.add_argument(
        "--on-import",
        action="store_true",
        help="for a patch of one model or feature: load and apply it when the module of its target is imported",
    )
    for option, meaning in {
        "why": "what is wrong with the target",
        "how": "what the replacement does differently",
        "upstream": "link to the issue upstream, or 'none: REASON'",
        "remove-when": "condition for the removal of the patch",
    }.items():
        new.add_argument(f"--{option}", metavar="TEXT", default="", help=f"{meaning} (default: to be filled in later)")
    new.add_argument(
        "--root",
        type=Path,
        metavar="FOLDER",
        default=Path("."),
        help="folder that has the package and the folder tests (default: the current folder)",
    )
    for parser in (show, check, diff, new, record):
        parser.add_argument(
            "--vllm",
            default="installed",
            metavar="VLLM",
            help="version, wheel, source archive, source tree or VERSION@PATH (default: installed)",
        )


def _patches(args: argparse.Namespace) -> PatchSet:
    from vllm_patchbay.patch import PatchSet

    if args.selection.packages is not None:
        own, *others = args.selection.packages()
        return PatchSet.of_packages([own, *others], may_be_empty=(own,))
    if not args.package:
        return PatchSet.announced()
    return PatchSet.of_packages([args.package], may_be_empty=[package.name for package in _guarded(args)])


def _guarded(args: argparse.Namespace) -> list[GuardedPackage]:
    from vllm_patchbay.patch import GuardedPackage

    if args.selection.guarded is not None:
        return [GuardedPackage.find(args.selection.guarded)]
    if not args.package:
        return GuardedPackage.announced()
    package = GuardedPackage.find(args.package)
    return [package] if package.record_file.exists() or args.run is _record else []


def _described_guard(guard: Guard, package: GuardedPackage) -> dict[str, Any]:
    return {
        "kind": "fast path" if guard.fast_path else "override",
        "name": guard.name,
        "target": guard.target,
        "on_drift": guard.reaction,
        "why": guard.why,
        "module": guard.place,
        "package": package.name,
        "fast_path": guard.fast_path or None,
        "feature": guard.feature or None,
        "mentions": list(guard.mentions),
    }


def _progress(args: argparse.Namespace) -> output.Progress:
    return output.progress_of(args.selection.program)


def _vllm(args: argparse.Namespace) -> tuple[SymbolIndex, str]:
    from vllm_patchbay.upstream import SymbolIndex, open_tree, version_of

    tree = open_tree(args.vllm, _progress(args))
    return SymbolIndex(tree), version_of(tree)


def _described(patch: Patch) -> dict[str, Any]:
    return {
        "kind": "patch",
        "name": patch.name,
        "target": patch.target,
        "on_drift": "applied with a warning" if patch.tolerates_change else "stops the start",
        "process": patch.process.value,
        "versions": patch.versions,
        "expires": patch.expires,
        "why": patch.why,
        "how": patch.how,
        "upstream": patch.upstream,
        "remove_when": patch.remove_when,
        "module": patch.module,
        "on_import": patch.on_import,
        "after": patch.after,
        "tolerates_change": patch.tolerates_change,
        "fingerprints": dict(patch.fingerprints),
    }


def _list(args: argparse.Namespace) -> int:
    patches = _patches(args)
    described = [_described(patch) for patch in patches.patches]
    described += [_described_guard(guard, package) for package in _guarded(args) for guard in package.guards()]
    if args.json:
        output.print_json(described)
    elif described:
        columns = ("kind", "name", "target", "on_drift", "why")
        output.print_table([c.upper() for c in columns], [[str(row[c]) for c in columns] for row in described])
    elif not patches.faults:
        print("There are no patches and no guarded overrides.")
    for fault in patches.faults.values():
        _progress(args)(f"error: {fault}")
    return 1 if patches.faults else 0


def _show(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch import verify

    patch = _patches(args).get(args.name)
    index, version = _vllm(args)
    verdict = verify(patch, index, version)
    described = _described(patch) | {
        "vllm": version,
        "outcome": verdict.outcome.value,
        "detail": verdict.detail,
        "fingerprint": verdict.fingerprint,
    }
    if args.json:
        output.print_json(described)
    else:
        width = max(map(len, described))
        for key, value in described.items():
            print(f"{key.ljust(width)}  {value}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch import Outcome, Verdict, verify

    patches = _patches(args)
    index, version = _vllm(args)
    verdicts = [verify(patch, index, version) for patch in patches.patches]
    verdicts += [Verdict(module, Outcome.BROKEN, str(fault)) for module, fault in patches.faults.items()]
    guards = [verdict for package in _guarded(args) for _, verdict in package.verify(index, version)]
    if args.json:
        described = {
            part: [{"name": v.patch, "outcome": v.outcome.value, "detail": v.detail, "diff": v.diff} for v in found]
            for part, found in (("patches", verdicts), ("guards", guards))
        }
        output.print_json({"vllm": version, **described})
    elif verdicts := verdicts + guards:
        output.print_table(
            ("PATCH OR GUARD", f"ON VLLM {version}", "DETAIL"), [(v.patch, v.outcome.value, v.detail) for v in verdicts]
        )
        for verdict in verdicts:
            if verdict.outcome.fails_check and verdict.diff:
                print(f"\n{verdict.patch}:\n{verdict.diff}")
    else:
        print("There are no patches and no guarded overrides to check.")
    return 1 if any(verdict.outcome.fails_check for verdict in [*verdicts, *guards]) else 0


def _record(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch.guard import Record, recorded

    index, version = _vllm(args)
    written: list[dict[str, Any]] = []
    for package in _guarded(args):
        guards = package.guards()
        changed = [guard.target for guard, verdict in package.verify(index, version) if verdict.outcome.fails_check]
        recorded(guards, Record.read(package.record_file), index, version).write(package.record_file)
        written.append({"file": str(package.record_file), "guards": len(guards), "changed": changed})
    if args.json:
        output.print_json({"vllm": version, "written": written})
        return 0
    for each in written:
        print(
            f"{each['file']}: {each['guards']} guards for vLLM {version}, {len(each['changed'])} of them new or changed"
        )
        for target in each["changed"]:
            print(f"  {target}")
    if not written:
        print("There are no guarded overrides to record.")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from packaging.version import Version

    patch = _patches(args).get(args.name)
    index, version = _vllm(args)
    known = max(patch.fingerprints, key=Version)
    before = _original_source(patch, known, _progress(args))
    target = index.resolve(patch.target_module, patch.target_name)
    after = index.normalized_source_of(target.module, target.qualname) if target.is_found else ""
    lines = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"vLLM {known}", f"vLLM {version}", lineterm="", n=3
        )
    )
    if args.json:
        output.print_json({"name": patch.name, "from": known, "to": version, "diff": lines, "exists": target.is_found})
    else:
        print("\n".join(lines) or f"{patch.target} is the same in vLLM {known} and {version}")
    return 0


def _original_source(patch: Patch, version: str, progress: output.Progress) -> str:
    """Returns the source whose fingerprint the patch has for a version: that of the installed vLLM, or of the published
    one. The fingerprint decides, because an edited tree keeps its version."""
    from vllm_patchbay.errors import PatchError
    from vllm_patchbay.patch import take_fingerprint
    from vllm_patchbay.upstream import SymbolIndex, open_tree, published_tree

    for opened in (open_tree, published_tree):
        index = SymbolIndex(opened(version, progress))
        if index.resolve(patch.target_module, patch.target_name).is_found:
            source = index.normalized_source_of(patch.target_module, patch.target_name)
            if take_fingerprint(source).digest == patch.known_fingerprints()[version].digest:
                return source
    raise PatchError(
        f"the fingerprint of {patch.name} for vLLM {version} is not that of the published {patch.target}; correct it"
    )


def _docs(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch.documentation import page

    guards = [guard for package in _guarded(args) for guard in package.guards()]
    text = page(_patches(args).require_complete(), f"{args.selection.program} docs", guards)
    if args.output:
        output.write(args.output, text)
    if args.json:
        output.print_json({"page": text})
    elif not args.output:
        print(text, end="")
    return 0


def _new(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch.skeleton import TEXT_FIELDS, NewPatch, write_skeleton

    package = args.selection.packages()[0] if args.selection.packages is not None else args.package
    index, version = _vllm(args)
    texts = {field: getattr(args, field) for field in TEXT_FIELDS}
    new = NewPatch(args.target, args.process, package, args.on_import, texts)
    written = write_skeleton(new, index, version, args.root)
    missing = [field for field in TEXT_FIELDS if not texts[field]]
    if args.json:
        output.print_json({"written": [str(path) for path in written], "missing": missing})
    else:
        for path in written:
            print(path)
        if missing:
            print(f"Fill in {', '.join(missing)}. Without them the patch cannot be imported.")
    return 0
