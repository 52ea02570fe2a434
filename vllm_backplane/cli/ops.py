"""Show the operators of each layer and the implementation that each operator runs.

An operator runs the device's kernel if there is one, otherwise its plain-PyTorch reference. Each line is one caller of
an operator: a layer of vLLM that Backplane replaces, or another extension point (attention backend, IR operator, runner
kernel, sampler, LoRA wrapper).

Some devices run PyTorch operators that they lack on the host. For those, this command also runs the references with
their test inputs and shows the PyTorch operators that ran on the host.

With --json, the keys are: device, reason, operators, linear (the operator of linear layers, by the dtype of their
weights). The keys of an operator are: operator, family, summary, implementation, provider, reason, called_by (kind and
layer), fell_back (PyTorch operators that ran on the host, with their number of calls).
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_backplane.cli import _output
from vllm_backplane.errors import OperatorError, nearest

if TYPE_CHECKING:
    from vllm_backplane.device import Device
    from vllm_backplane.ops.operator import Operator

NAME = "ops"
HELP = "show the implementation of each layer and operator"

_PACKAGE = "vllm_backplane."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="the device to show (default: the one that would be used)")
    parser.add_argument("--family", metavar="F", help="show one family of operators only, such as 'norms'")
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    _check_family(args.family)
    device, reason, forced = _choose(args.device)
    shown = [line for line in table(device, forced) if args.family in (None, line["family"])]
    if args.json:
        _output.print_json({"device": device.name, "reason": reason, "operators": shown, "linear": linear(device)})
        return 0
    _output.print_table(
        ("LAYER", "KIND", "OPERATOR", "IMPLEMENTATION", "PROVIDER", "REASON"),
        [
            (
                caller["layer"],
                caller["kind"],
                line["operator"],
                line["implementation"],
                line["provider"].removeprefix(_PACKAGE),
                line["reason"],
            )
            for line in shown
            for caller in line["called_by"] or [{"layer": "-", "kind": "-"}]
        ],
    )
    count = Counter(line["implementation"] for line in shown)
    implementations = f"{count['kernel']} by kernel, {count['reference']} by reference"
    print(f"\n{len(shown)} operators on device {device.name}: {implementations}")
    weights = ", ".join(f"{dtype} {operator}" for dtype, operator in linear(device).items())
    print(f"Operator of linear layers by the dtype of their weights: {weights}")
    if counts_fallbacks(device):
        _print_fallbacks(shown)
    return 0


def _print_fallbacks(shown: list[dict[str, Any]]) -> None:
    lines = [(line["operator"], name) for line in shown for name in line["fell_back"]]
    if not lines:
        print("No reference runs a PyTorch operator on the host.")
        return
    print("\nPyTorch operators that the device lacks, which references therefore run on the host:")
    _output.print_table(("REFERENCE OF", "ON THE HOST"), lines)


def _check_family(family: str | None) -> None:
    import vllm_backplane.ops  # noqa: F401  # declares the operators
    from vllm_backplane.ops.operator import declared

    families = {operator.family for operator in declared().values()}
    if family is not None and family not in families:
        raise OperatorError(
            f"no operators of family {family!r}{nearest(family, families)} Families: {', '.join(sorted(families))}."
        )


def _choose(name: str | None) -> tuple[Device, str, tuple[str, ...]]:
    """Returns the device, the reason for the choice, and the operators that an option forces to their reference."""
    from vllm_backplane.runtime import choose

    chosen = choose(name=name)
    return chosen.device, chosen.selection.reason, chosen.setting("reference_ops")


def table(device: Device, forced: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns every operator, sorted by family, with its implementation and its callers."""
    from vllm_backplane.binding.operator_callers import callers
    from vllm_backplane.ops import resolution
    from vllm_backplane.ops.operator import operator_named

    device.load()
    device.load_kernels()
    calling = callers()
    lines = [
        {
            "operator": line.operator,
            "family": line.family,
            "summary": operator_named(line.operator).summary,
            "implementation": line.implementation,
            "provider": line.provider,
            "reason": line.reason,
            "called_by": [{"kind": kind, "layer": layer} for kind, layer in calling.get(line.operator, ())],
            "fell_back": fell_back(device, operator_named(line.operator)) if line.implementation == "reference" else {},
        }
        for line in resolution.resolve(device.dispatch_key, device.kernel_provider(), forced)
    ]
    return sorted(lines, key=lambda line: (line["family"], line["operator"]))


def linear(device: Device) -> dict[str, str]:
    """Returns the operator that linear layers use, by the dtype of their weights."""
    import torch

    found = {}
    for dtype in device.capabilities.dtypes:
        weight = torch.zeros(64, 64, dtype=dtype, device=device.torch_device())
        arranged = device.arrange_linear(weight) is not None
        found[str(dtype).removeprefix("torch.")] = "blocked_linear" if arranged else "linear"
    return found


def counts_fallbacks(device: Device) -> bool:
    """Returns whether the device reports the PyTorch operators that it ran on the host."""
    from vllm_backplane.device import Device

    return type(device).fallbacks is not Device.fallbacks


def fell_back(device: Device, operator: Operator) -> dict[str, int]:
    """Runs an operator's reference with its samples and returns the PyTorch operators that ran on the host."""
    from vllm_backplane.ops.operator import SampleSpace

    if not counts_fallbacks(device):
        return {}
    before = device.fallbacks()
    for sample in operator.samples(SampleSpace(device.torch_device(), operator.dtypes[0])):
        operator.reference(*sample.args)
    device.synchronize()
    return {
        name: count - before.get(name, 0) for name, count in device.fallbacks().items() if count > before.get(name, 0)
    }
