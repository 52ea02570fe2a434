"""Measures the processor time in which a start verifies the guards of code that depends on private source of vLLM.

    python -m benchmarks.guards               # the installed vLLM
    python -m benchmarks.guards --rounds 20

Every guard is verified, as in a server that uses every feature. Each round reads the files of vLLM and the fingerprints
again. Nothing of vLLM is imported.
"""

from __future__ import annotations

import argparse
import statistics
import time

from vllm_patchbay.patch import GuardedPackage, Guards
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version

PACKAGE = GuardedPackage.find("vllm_backplane")


def processor_seconds() -> float:
    """Returns the processor time of `Guards.verify_installed` with every feature in use."""
    guards = Guards(PACKAGE.record_file, setting="BACKPLANE_PATCH_DRIFT=warn")
    for guard in PACKAGE.guards():
        options = {name: getattr(guard, name) for name in ("why", "fast_path", "versions", "feature", "mentions")}
        guards.guarded(guard.target, **options)(object())
    features = {guard.feature for guard in guards.declared}
    began = time.process_time()
    index, version = SymbolIndex(installed_tree()), str(installed_version())
    for feature in features:
        guards.verify(lambda: index, version, feature)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    args = parser.parse_args()
    taken = sorted(processor_seconds() * 1000 for _ in range(args.rounds))
    median, spread = statistics.median(taken), f"{taken[0]:.0f} to {taken[-1]:.0f}"
    print(f"{len(PACKAGE.guards())} guards, vLLM {installed_version()}, {args.rounds} rounds")
    print(f"processor time: {median:.0f} ms ({spread})")


if __name__ == "__main__":
    main()
