"""Installs what the metadata of the installed vLLM requires, as far as the package index has it.

    python scripts/install_requirements_of_vllm.py [PIP ARGUMENT …] -- [REQUIREMENT …]

vLLM's requirements and the given ones are resolved together by pip. If the index has no version that satisfies one of
vLLM's requirements, its lower bounds and exact versions are left out, and the requirement is reported here and by
`vllm-backplane doctor`. Any other failure of pip is the exit status.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

_UNMET = re.compile(r"^ERROR: No matching distribution found for (.+?)(?: \(from .*\))?$", re.MULTILINE)


def required(declared: Sequence[str]) -> dict[str, Requirement]:
    """Returns the requirements that apply on this machine, by canonical name."""
    found: dict[str, Requirement] = {}
    for each in map(Requirement, declared):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            known = found.setdefault(canonicalize_name(each.name), each)
            known.specifier &= each.specifier
            known.extras |= each.extras
    return found


def install(
    pip: Callable[[list[str]], tuple[int, str]], wanted: dict[str, Requirement], given: Sequence[str]
) -> tuple[int, list[Requirement]]:
    """Runs pip until it succeeds, each time without the lower bounds and exact versions of one more requirement that
    the index cannot satisfy.

    Returns pip's exit status and these requirements.
    """
    unmet: dict[str, Requirement] = {}
    while True:
        lines = [_line(each, _loosened(each) if name in unmet else each.specifier) for name, each in wanted.items()]
        status, output = pip([*lines, *given])
        missing = _UNMET.search(output) if status else None
        name = canonicalize_name(Requirement(missing[1]).name) if missing is not None else ""
        if name not in wanted or name in unmet or not wanted[name].specifier:
            return status, list(unmet.values())
        unmet[name] = wanted[name]


def _line(requirement: Requirement, specifier: SpecifierSet) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{specifier}"


def _loosened(requirement: Requirement) -> SpecifierSet:
    kept = [str(each) for each in requirement.specifier if each.operator in ("<", "<=", "!=")]
    # ~=2.4.1 means at least 2.4.1, and some 2.4
    kept += [f"=={each.version.rpartition('.')[0]}.*" for each in requirement.specifier if each.operator == "~="]
    return SpecifierSet(",".join(kept))


def _run_pip(arguments: Sequence[str]) -> Callable[[list[str]], tuple[int, str]]:
    def run(requirements: list[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments, *requirements]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if not line.startswith(("Requirement already", "Looking in")):
                print(line, end="", flush=True)
        return process.wait(), "".join(output)

    return run


def main() -> int:
    arguments = sys.argv[1:]
    divider = arguments.index("--") if "--" in arguments else len(arguments)
    vllm = distribution("vllm")
    # vLLM itself is not among the requirements: pip would insist on the ones that cannot be met.
    status, unmet = install(_run_pip(arguments[:divider]), required(vllm.requires or ()), arguments[divider + 1 :])
    if status == 0:
        for each in unmet:
            print(
                f"vLLM {vllm.version} requires {_line(each, each.specifier)}, which the package index does not have; "
                f"{each.name} {_installed(each.name)} is installed instead."
            )
    return status


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(no version)"


if __name__ == "__main__":
    sys.exit(main())
