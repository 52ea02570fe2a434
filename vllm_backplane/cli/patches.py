"""The patches of vLLM: which there are, why, whether they fit a vLLM, and which can go.

'check' reads source and imports nothing of vLLM; the vLLM may be the installed one, a version, a wheel or a tree.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_backplane.cli import _output

if TYPE_CHECKING:
    from vllm_backplane.patch import Patch, PatchSet
    from vllm_backplane.upstream import SymbolIndex

NAME = "patches"
HELP = "list, check, explain or start patches of vLLM"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)

    def action(name: str, help: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=help)
        added.add_argument(
            "--package", metavar="PACKAGE", help="patches of this package only, such as another plugin's (default: all)"
        )
        _output.add_json_flag(added)
        return added

    action("list", "show every patch with its target and process")
    show = action("show", "show one patch: reason, method, link, end, fingerprint on this vLLM")
    show.add_argument("name", metavar="NAME")
    check = action("check", "verify every patch; exit 1 if one is missing its target, drifted or expired")
    diff = action("diff", "compare a target with the source the patch was written against")
    diff.add_argument("name", metavar="NAME")
    docs = action("docs", "print the page that documents every patch")
    docs.add_argument("--output", type=Path, metavar="FILE", help="write the page there instead")
    new = action("new", "write the skeleton of a patch and of its two tests")
    new.add_argument(
        "target", metavar="MODULE:NAME", help="what to patch, such as vllm.config.model:ModelConfig.verify"
    )
    new.add_argument("--process", choices=("platform", "engine", "worker"), required=True)
    new.add_argument("--on-import", action="store_true", help="for a patch of one model or feature: load it with that")
    for field in ("why", "how", "upstream", "remove-when"):
        new.add_argument(f"--{field}", metavar="TEXT", default="", help="that field; without it, fill it in by hand")
    new.add_argument("--root", type=Path, default=Path("."), help="the repository to write into (default: this folder)")
    for parser_ in (show, check, diff, new):
        parser_.add_argument(
            "--vllm", default="installed", metavar="SPEC", help="a version, wheel or tree (default: the installed vLLM)"
        )


def run(args: argparse.Namespace) -> int:
    actions = {"list": _list, "show": _show, "check": _check, "diff": _diff, "docs": _docs, "new": _new}
    return actions[args.action](args)


def _patches(args: argparse.Namespace) -> PatchSet:
    from vllm_backplane.patch import PatchSet

    return PatchSet.of_packages([args.package]) if args.package else PatchSet.installed()


def _vllm(args: argparse.Namespace) -> tuple[SymbolIndex, str]:
    from vllm_backplane.upstream import SymbolIndex, open_tree, version_of

    tree = open_tree(args.vllm, _output.progress)
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
        _output.print_json(described)
    elif described:
        columns = ("name", "target", "process", "versions", "why")
        _output.print_table([c.upper() for c in columns], [[str(row[c]) for c in columns] for row in described])
    elif not patches.faults:
        print("No patches: everything goes through vLLM's own hooks.")
    for fault in patches.faults.values():
        _output.progress(f"error: {fault}")
    return 1 if patches.faults else 0


def _show(args: argparse.Namespace) -> int:
    from vllm_backplane.patch import verify

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
        _output.print_json(described)
    else:
        width = max(map(len, described))
        for key, value in described.items():
            print(f"{key.ljust(width)}  {value}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from vllm_backplane.patch import Outcome, Verdict, verify

    patches = _patches(args)
    index, version = _vllm(args)
    verdicts = [verify(patch, index, version) for patch in patches.patches]
    verdicts += [Verdict(module, Outcome.BROKEN, str(fault)) for module, fault in patches.faults.items()]
    if args.json:
        _output.print_json(
            {
                "vllm": version,
                "patches": [
                    {"name": v.patch, "outcome": v.outcome.value, "detail": v.detail, "diff": v.diff} for v in verdicts
                ],
            }
        )
    elif verdicts:
        _output.print_table(
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
    before = _written_against(patch, known)
    target = index.resolve(patch.target_module, patch.target_name)
    after = index.normalised_source_of(target.module, target.qualname) if target.is_found else ""
    lines = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"vLLM {known}", f"vLLM {version}", lineterm="", n=3
        )
    )
    if args.json:
        _output.print_json({"name": patch.name, "from": known, "to": version, "diff": lines, "exists": target.is_found})
    else:
        print("\n".join(lines) or f"{patch.target} is the same in vLLM {known} and {version}")
    return 0


def _written_against(patch: Patch, version: str) -> str:
    """The source whose fingerprint the patch has for a version: the installed vLLM's if it is that, else the published
    one's. An edited tree keeps its version, so that alone says nothing."""
    from vllm_backplane.errors import PatchError
    from vllm_backplane.patch import take_fingerprint
    from vllm_backplane.upstream import SymbolIndex, open_tree, published_tree

    for opened in (open_tree, published_tree):
        index = SymbolIndex(opened(version, _output.progress))
        if index.resolve(patch.target_module, patch.target_name).is_found:
            source = index.normalised_source_of(patch.target_module, patch.target_name)
            if take_fingerprint(source).digest == patch.known()[version].digest:
                return source
    raise PatchError(
        f"the fingerprint that {patch.name} has for vLLM {version} is not that of {patch.target} as it was published; "
        "correct it"
    )


def _docs(args: argparse.Namespace) -> int:
    from vllm_backplane.patch.documentation import page

    text = page(_patches(args).whole())
    if args.output:
        _output.write(args.output, text)
    if args.json:
        _output.print_json({"page": text})
    elif not args.output:
        print(text, end="")
    return 0


def _new(args: argparse.Namespace) -> int:
    from vllm_backplane.patch.collection import OWN_PACKAGE
    from vllm_backplane.patch.skeleton import EXPLANATIONS, Wanted, write

    index, version = _vllm(args)
    explained = {field: getattr(args, field) for field in EXPLANATIONS}
    wanted = Wanted(args.target, args.process, args.package or OWN_PACKAGE, args.on_import, explained)
    written = write(wanted, index, version, args.root)
    missing = [field for field in EXPLANATIONS if not explained[field]]
    if args.json:
        _output.print_json({"written": [str(path) for path in written], "missing": missing})
    else:
        for path in written:
            print(path)
        if missing:
            print(f"Fill in {', '.join(missing)}: the patch cannot be imported before.")
    return 0
