"""The commands about patches: list, show, check, diff, docs, new.

`vllm-patchbay` has them for the patches of any plugin, and a plugin's own command line can offer them for its own
(`Scope`). None of them imports vLLM.
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
    from vllm_patchbay.patch import Patch, PatchSet
    from vllm_patchbay.upstream import SymbolIndex


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose patches the commands are about, and under which name they are called."""

    program: str = "vllm-patchbay"
    packages: Callable[[], Sequence[str]] | None = None
    """The packages of patches, the plugin's own first, which may be empty. None: the user chooses one by --package, or
    takes every announced one."""


def add_commands(commands: Any, scope: Scope) -> None:
    """Adds the commands to the subparsers of a command line. Each sets ``run``."""

    def command(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False
        )
        if scope.packages is None:
            added.add_argument(
                "--package",
                metavar="PACKAGE",
                help="package of patches, such as my_plugin.patches (default: every announced one)",
            )
        output.add_json_flag(added)
        added.set_defaults(run=run, scope=scope, parser=added)
        return added

    command("list", "show every patch with its target and process", _list)
    show = command("show", "show one patch: reason, method, link, end, fingerprint on this vLLM", _show)
    show.add_argument("name", metavar="NAME")
    check = command("check", "verify every patch; exit 1 if one is missing its target, drifted or expired", _check)
    diff = command("diff", "compare a target with the source the patch was written against", _diff)
    diff.add_argument("name", metavar="NAME")
    docs = command("docs", "print the page that documents every patch", _docs)
    docs.add_argument("--output", type=Path, metavar="FILE", help="write the page there instead")
    new = command("new", "write the skeleton of a patch and of its two tests", _new)
    new.add_argument(
        "target", metavar="MODULE:NAME", help="what to patch, such as vllm.config.model:ModelConfig.verify"
    )
    new.add_argument("--process", choices=("platform", "engine", "worker"), required=True)
    new.add_argument("--on-import", action="store_true", help="for a patch of one model or feature: load it with that")
    for field in ("why", "how", "upstream", "remove-when"):
        new.add_argument(f"--{field}", metavar="TEXT", default="", help="that field; without it, fill it in by hand")
    new.add_argument("--root", type=Path, default=Path("."), help="the repository to write into (default: this folder)")
    for parser in (show, check, diff, new):
        parser.add_argument(
            "--vllm", default="installed", metavar="SPEC", help="a version, wheel or tree (default: the installed vLLM)"
        )


def _patches(args: argparse.Namespace) -> PatchSet:
    from vllm_patchbay.patch import PatchSet

    if args.scope.packages is not None:
        own, *others = args.scope.packages()
        return PatchSet.of_packages([own, *others], may_be_empty=(own,))
    return PatchSet.of_packages([args.package]) if args.package else PatchSet.announced()


def _progress(args: argparse.Namespace) -> output.Progress:
    return output.progress_of(args.scope.program)


def _vllm(args: argparse.Namespace) -> tuple[SymbolIndex, str]:
    from vllm_patchbay.upstream import SymbolIndex, open_tree, version_of

    tree = open_tree(args.vllm, _progress(args))
    return SymbolIndex(tree), version_of(tree)


def _described(patch: Patch) -> dict[str, Any]:
    return {
        "name": patch.name,
        "target": patch.target,
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
    if args.json:
        output.print_json(described)
    elif described:
        columns = ("name", "target", "process", "versions", "why")
        output.print_table([c.upper() for c in columns], [[str(row[c]) for c in columns] for row in described])
    elif not patches.faults:
        print("No patches are declared or announced.")
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
    if args.json:
        output.print_json(
            {
                "vllm": version,
                "patches": [
                    {"name": v.patch, "outcome": v.outcome.value, "detail": v.detail, "diff": v.diff} for v in verdicts
                ],
            }
        )
    elif verdicts:
        output.print_table(
            ("PATCH", f"ON VLLM {version}", "DETAIL"), [(v.patch, v.outcome.value, v.detail) for v in verdicts]
        )
        for verdict in verdicts:
            if verdict.outcome.fails_a_check and verdict.diff:
                print(f"\n{verdict.patch}:\n{verdict.diff}")
    else:
        print("No patches to check.")
    return 1 if any(verdict.outcome.fails_a_check for verdict in verdicts) else 0


def _diff(args: argparse.Namespace) -> int:
    from packaging.version import Version

    patch = _patches(args).get(args.name)
    index, version = _vllm(args)
    known = max(patch.fingerprints, key=Version)
    before = _written_against(patch, known, _progress(args))
    target = index.resolve(patch.target_module, patch.target_name)
    after = index.normalised_source_of(target.module, target.qualname) if target.is_found else ""
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


def _written_against(patch: Patch, version: str, progress: output.Progress) -> str:
    """The source whose fingerprint the patch has for a version: the installed vLLM's if it is that, else the published
    one's. An edited tree keeps its version, so that alone says nothing."""
    from vllm_patchbay.errors import PatchError
    from vllm_patchbay.patch import take_fingerprint
    from vllm_patchbay.upstream import SymbolIndex, open_tree, published_tree

    for opened in (open_tree, published_tree):
        index = SymbolIndex(opened(version, progress))
        if index.resolve(patch.target_module, patch.target_name).is_found:
            source = index.normalised_source_of(patch.target_module, patch.target_name)
            if take_fingerprint(source).digest == patch.known()[version].digest:
                return source
    raise PatchError(
        f"the fingerprint that {patch.name} has for vLLM {version} is not that of {patch.target} as it was published; "
        "correct it"
    )


def _docs(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch.documentation import page

    text = page(_patches(args).whole(), f"{args.scope.program} docs")
    if args.output:
        output.write(args.output, text)
    if args.json:
        output.print_json({"page": text})
    elif not args.output:
        print(text, end="")
    return 0


def _new(args: argparse.Namespace) -> int:
    from vllm_patchbay.patch.skeleton import EXPLANATIONS, Wanted, write

    package = args.scope.packages()[0] if args.scope.packages is not None else args.package
    if not package:
        args.parser.error("--package is missing: name the package to write the patch into, such as my_plugin.patches")
    index, version = _vllm(args)
    explained = {field: getattr(args, field) for field in EXPLANATIONS}
    wanted = Wanted(args.target, args.process, package, args.on_import, explained)
    written = write(wanted, index, version, args.root)
    missing = [field for field in EXPLANATIONS if not explained[field]]
    if args.json:
        output.print_json({"written": [str(path) for path in written], "missing": missing})
    else:
        for path in written:
            print(path)
        if missing:
            print(f"Fill in {', '.join(missing)}: the patch cannot be imported before.")
    return 0
