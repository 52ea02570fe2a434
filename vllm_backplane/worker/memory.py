"""How much memory a worker may use, and what of it is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

GIB = 1 << 30

KEPT_FROM_HOST = 0.03
KEPT_FROM_HOST_AT_LEAST = 512 << 20
"""Of the host's memory, whatever share was asked for: the API server, log-probabilities and all others need some."""


def gib(count: int | float) -> str:
    return f"{count / GIB:.2f} GiB"


def extrapolate(peaks: dict[int, int], tokens: int) -> int:
    """Peak memory of a forward pass with `tokens`, on the line through the two smaller ones that were measured."""
    (small, low), (large, high) = min(peaks.items()), max(peaks.items())
    if large == small:
        return high
    slope = max(high - low, 0) / (large - small)
    return max(int(high + slope * (tokens - large)), low)


@dataclass(frozen=True, slots=True)
class Budget:
    """Settled before weights are loaded. Workers that share the host's memory get equal parts of it."""

    device: Device
    card: int
    share: float
    workers: int
    total: int
    free_at_start: int
    used_by_us_at_start: int

    @classmethod
    def at_start(cls, device: Device, card: int, share: float, workers: int) -> Budget:
        now = device.memory(card)
        parts = workers if device.capabilities.host_memory else 1
        return cls(device, card, share, parts, now.total, now.free, device.own_memory(card))

    @property
    def place(self) -> str:
        """As a user knows it: the host has one memory, and of cards there may be several."""
        return self.device.name if self.device.capabilities.host_memory else f"{self.device.name}:{self.card}"

    @property
    def kept(self) -> int:
        """Never given out: where memory is the host's, a server that takes all of it ends in the OOM killer."""
        if not self.device.capabilities.host_memory:
            return 0
        return max(KEPT_FROM_HOST_AT_LEAST, int(self.total * KEPT_FROM_HOST))

    @property
    def allowed(self) -> int:
        return min(int(self.free_at_start * self.share) // self.workers, self.most)

    @property
    def most(self) -> int:
        """What a share of 1 would allow."""
        return max(self.free_at_start - self.kept, 0) // self.workers

    @property
    def _parts(self) -> str:
        return f" / {self.workers} workers" if self.workers > 1 else ""

    def describe(self) -> str:
        kept = f", all but {gib(self.kept)} at most" if self.free_at_start * (1 - self.share) < self.kept else ""
        return (
            f"Memory on {self.place}: {gib(self.total)} in all, {gib(self.free_at_start)} free; weights and KV "
            f"cache may take {self.share:.2f} of that{kept}{self._parts} = {gib(self.allowed)} (option memory_share)."
        )

    def _terms(self) -> str:
        """What `allowed` comes from."""
        if self.kept and self.allowed == self.most:
            return f"{gib(self.free_at_start)} free at start less {gib(self.kept)} kept for the host{self._parts}"
        return f"share {self.share:.2f} of {gib(self.free_at_start)} free at start{self._parts}"

    def refuse_weights(self, expected: int) -> None:
        """Before loading: weights that cannot fit would end in the system's OOM killer."""
        if expected > self.allowed:
            share = "raise BACKPLANE_MEMORY_SHARE, " if expected <= self.most else ""
            raise BackplaneError(
                f"the weights take {gib(expected)} per worker, and {gib(self.allowed)} may be used on "
                f"{self.place} ({self._terms()}); {share}choose a smaller --dtype or model, free memory, or add "
                "workers on other hosts"
            )

    def reserve(self, measured: int) -> int:
        """Memory to keep for activations: what was measured, or a tenth where the device does not measure."""
        measures = type(self.device).peak_memory is not Device.peak_memory
        return measured if measures else max(measured, self.allowed // 10)

    def kv_cache_bytes(self, asked: int | None, activations: int, option: str = "--kv-cache-memory-bytes") -> int:
        """What the KV cache may take now that weights are loaded; a largest step needs `activations` beside it.

        `asked` is a size that the user stated by `option`.
        """
        free = max(self.device.memory(self.card).free - activations * self.workers - self.kept, 0)
        if asked is not None:
            if asked > free // self.workers:
                raise BackplaneError(
                    f"a KV cache of {gib(asked)} was asked for, and {gib(free // self.workers)} of {gib(self.total)} "
                    f"is free for it on {self.place}; lower {option}"
                )
            return asked
        taken = max(self.device.own_memory(self.card) - self.used_by_us_at_start, 0)
        left = min(self.allowed - taken - activations, int(free * self.share) // self.workers)
        if left <= 0:
            # Others may have taken what was free at start.
            now = f", beside which {gib(free)} is free now" if free == 0 else ""
            share = "raise BACKPLANE_MEMORY_SHARE, " if free and self.most > taken + activations else ""
            raise BackplaneError(
                f"nothing is left for the KV cache on {self.place}: {gib(self.allowed)} allowed ({self._terms()}), "
                f"weights took {gib(taken)} and a largest step needs {gib(activations)}{now}; {share}lower "
                "--max-num-batched-tokens, or free memory"
            )
        return left

    def describe_kv_cache(self, granted: int, asked: int | None, activations: int) -> str:
        if asked is not None:
            return f"KV cache: {gib(granted)}, as asked for (--kv-cache-memory-bytes)."
        return f"KV cache: {gib(granted)}; {gib(activations)} are kept for the activations of a largest step."
