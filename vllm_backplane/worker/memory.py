"""Computes how much memory a worker may use, and how much of it the KV cache gets."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

GIB = 1 << 30

HOST_RESERVE_SHARE = 0.03
HOST_RESERVE_MIN_BYTES = 512 << 20
"""Host memory that no worker takes, whatever share the user requests: the API server, log-probabilities and other
processes need some."""

PROCESS_RESERVE_BYTES = 512 << 20
"""Address space of a limited process that is left for threads, mapped files and the heap."""


def gib(count: int | float) -> str:
    return f"{count / GIB:.2f} GiB"


def extrapolate(peaks: dict[int, int], tokens: int) -> int:
    """Returns the peak memory of a forward pass with `tokens`, on the line through two smaller measured passes."""
    (small, low), (large, high) = min(peaks.items()), max(peaks.items())
    if large == small:
        return high
    slope = max(high - low, 0) / (large - small)
    return max(int(high + slope * (tokens - large)), low)


@dataclass(frozen=True, slots=True)
class Budget:
    """Computes the memory budget of a worker, measured before weights are loaded. Workers that share the host's memory
    get equal parts of it."""

    device: Device
    card: int
    share: float
    workers: int
    total: int
    free_at_start: int
    own_at_start: int
    reserved_by_others: int = 0
    limit: str = ""
    left_to_process: int | None = None
    """Bytes that a limit of this process leaves it, such as `limit` = "ulimit -v"."""

    @classmethod
    def at_start(cls, device: Device, card: int, share: float, workers: int) -> Budget:
        """Measures the memory now, and returns the budget for `share` of what is free."""
        now = device.memory(card)
        sharing = workers if device.capabilities.host_memory else 1
        return cls(
            device,
            card,
            share,
            sharing,
            now.total,
            now.free,
            device.own_memory(card),
            now.reserved_by_others,
            now.limit,
            now.left_to_process,
        )

    @property
    def place(self) -> str:
        """Returns the device name for messages, with the card's number unless all workers share the host's memory."""
        return self.device.name if self.device.capabilities.host_memory else f"{self.device.name}:{self.card}"

    @property
    def host_reserve(self) -> int:
        """Returns the bytes that are never used: the OOM killer ends a server that takes all of the host's memory."""
        if not self.device.capabilities.host_memory:
            return 0
        return max(HOST_RESERVE_MIN_BYTES, int(self.total * HOST_RESERVE_SHARE))

    @property
    def allowed(self) -> int:
        """Returns the bytes that this worker may use."""
        return min(int(self.free_at_start * self.share) // self.workers, self.maximum)

    @property
    def maximum(self) -> int:
        """Returns the bytes that a share of 1 would allow."""
        return self._within_limit(max(self.free_at_start - self.host_reserve, 0) // self.workers, self.left_to_process)

    @staticmethod
    def _within_limit(count: int, left: int | None) -> int:
        """Returns at most what the limit of this process leaves, without what threads and mapped files need."""
        return count if left is None else min(count, max(left - PROCESS_RESERVE_BYTES, 0))

    @property
    def _is_limited(self) -> bool:
        """Returns whether the limit of this process allows less than the memory of the machine would."""
        return self.left_to_process is not None and self.allowed == self._within_limit(
            self.allowed + 1, self.left_to_process
        )

    @property
    def _divisor(self) -> str:
        return f" / {self.workers} workers" if self.workers > 1 else ""

    @property
    def _free(self) -> str:
        """Returns the free memory for messages, with what limits it and what was deducted."""
        limit = f", {gib(self.left_to_process)} within {self.limit}" if self.left_to_process is not None else ""
        others = f" beside {gib(self.reserved_by_others)} that other processes have reserved"
        return f"{gib(self.free_at_start)} free{limit}{others if self.reserved_by_others else ''}"

    def describe(self) -> str:
        """Returns the log line about the budget."""
        if self._is_limited:
            return (
                f"Memory on {self.place}: {gib(self.total)} in all, {self._free}; weights and KV cache may take "
                f"{gib(self.allowed)}, all but {gib(PROCESS_RESERVE_BYTES)} of what {self.limit} leaves."
            )
        is_limited = self.free_at_start * (1 - self.share) < self.host_reserve
        limit = f", all but {gib(self.host_reserve)} at most" if is_limited else ""
        return (
            f"Memory on {self.place}: {gib(self.total)} in all, {self._free}; weights and KV cache may take "
            f"{self.share:.2f} of that{limit}{self._divisor} = {gib(self.allowed)} (option memory_share)."
        )

    def _terms(self) -> str:
        """Returns how `allowed` was computed."""
        if self._is_limited:
            return f"{self._free} at start, of which {gib(PROCESS_RESERVE_BYTES)} are for threads and mapped files"
        if self.host_reserve and self.allowed == self.maximum:
            return f"{self._free} at start less {gib(self.host_reserve)} reserved for the host{self._divisor}"
        return f"share {self.share:.2f} of {self._free} at start{self._divisor}"

    def refuse_weights(self, expected: int) -> None:
        """Raises before loading if the weights cannot fit. Loading them would end in the system's OOM killer."""
        if expected > self.allowed:
            share = "raise BACKPLANE_MEMORY_SHARE, " if expected <= self.maximum else ""
            share += f"raise {self.limit}, " if self._is_limited else ""
            raise BackplaneError(
                f"the weights take {gib(expected)} per worker, and {gib(self.allowed)} may be used on "
                f"{self.place} ({self._terms()}); {share}choose a smaller --dtype or model, free memory, or add "
                "workers on other hosts"
            )

    def activation_bytes(self, measured: int) -> int:
        """Returns the memory to reserve for activations: the measured bytes, or at least a tenth of the budget on a
        device that cannot measure peak memory."""
        measures = type(self.device).peak_memory is not Device.peak_memory
        return measured if measures else max(measured, self.allowed // 10)

    def kv_cache_bytes(self, requested: int | None, activations: int, option: str = "--kv-cache-memory-bytes") -> int:
        """Returns the size of the KV cache after weights are loaded, or raises if there is not enough memory.

        `requested` is a size that the user set with `option`. `activations` are the bytes that a largest step needs
        besides the KV cache.
        """
        memory = self.device.memory(self.card)
        free = max(memory.free - activations * self.workers - self.host_reserve, 0)
        if memory.left_to_process is not None:
            left = max(memory.left_to_process - activations, 0)
            free = min(free, self._within_limit(free // self.workers, left) * self.workers)
        others = f"{gib(memory.reserved_by_others)} that other processes have reserved"
        within = f" within {memory.limit}" if memory.limit else ""
        beside = within + (f" beside {others}" if memory.reserved_by_others else "")
        if requested is not None:
            if requested > free // self.workers:
                raise BackplaneError(
                    f"a KV cache of {gib(requested)} was requested, and {gib(free // self.workers)} of "
                    f"{gib(self.total)} is free for it on {self.place}{beside}; lower {option}"
                )
            return requested
        taken = max(self.device.own_memory(self.card) - self.own_at_start, 0)
        left = min(self.allowed - taken - activations, int(free * self.share) // self.workers)
        if left <= 0:
            # Other processes may have taken memory that was free at start.
            now = (
                f", and {gib(free)} is free beside them{' and ' + others if memory.reserved_by_others else ''} now"
                if free == 0
                else ""
            )
            share = "raise BACKPLANE_MEMORY_SHARE, " if free and self.maximum > taken + activations else ""
            share += f"raise {memory.limit}, " if memory.limit else ""
            raise BackplaneError(
                f"nothing is left for the KV cache on {self.place}: {gib(self.allowed)} allowed ({self._terms()}), "
                f"weights took {gib(taken)} and a largest step needs {gib(activations)}{now}; {share}lower "
                "--max-num-batched-tokens, or free memory"
            )
        return left

    def describe_kv_cache(self, granted: int, requested: int | None, activations: int) -> str:
        """Returns the log line about the KV cache."""
        if requested is not None:
            return f"KV cache: {gib(granted)}, as requested (--kv-cache-memory-bytes)."
        return f"KV cache: {gib(granted)}; {gib(activations)} are reserved for the activations of a largest step."
