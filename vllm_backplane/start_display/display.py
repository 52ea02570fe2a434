"""Decides what the terminal shows of a start: phases with their times, addresses, warnings, and how it ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from vllm_backplane.process import start_events
from vllm_backplane.start_display.addresses import address_lines, curl_lines
from vllm_backplane.start_display.left_out import concerns_user
from vllm_backplane.start_display.log_lines import LogReader, Message
from vllm_backplane.start_display.terminal import Terminal, fitting

PHASES: Mapping[str, str] = {
    "imports": "imports",
    "model": "model",
    "memory": "engine",
    "weights": "weights",
    "kv_cache": "KV cache",
    "warm_up": "warm-up",
    "ready": "server",
}
"""The phases of a start in their order, by the step that completes each."""
INDENT = 22
"""Columns before the details of a phase."""
HELD_SECONDS = 5.0
"""Seconds for which an error waits. If the server ends in this time, only the error that caused it is shown."""
RECENT_SECONDS = 60.0
"""Seconds before the end of a server in which the error that caused it is looked for."""
MOST_WARNINGS = 5
"""Warnings that are shown of a start. Some are issued once for each weight."""
REPEAT_SECONDS = 60.0
"""Seconds in which the same warning is shown once."""
MOST_REMEMBERED = 200
LONGEST_MESSAGE = 400
"""Characters of a warning or an error while the server runs. The log has all of it."""
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
    "Executor failed",
    "EngineDeadError",
    "BrokenPipeError",
    "root cause",
)
"""Parts of errors that follow from another error."""
_SUCCESSES = (0, 130, 143)
_GIB, _MIB = 1 << 30, 1 << 20


def size(count: int) -> str:
    """Returns a number of bytes for people."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


class Display:
    """Follows one server. Every method may write to the terminal."""

    def __init__(
        self,
        terminal: Terminal,
        log: str,
        began: float,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._terminal, self._log, self._began = terminal, log, began
        self._clock, self._time_of_day = clock, time_of_day
        self._reader = LogReader()
        self._phase = 0  # index in PHASES of the phase that is under way
        self._at = 0.0  # when it began
        self._facts: dict[str, Any] = {}
        self._waiting: list[tuple[float, Message]] = []  # errors
        self._recent: deque[tuple[float, Message]] = deque(maxlen=50)  # errors, those that wait included
        self._printed: dict[str, float] = {}
        self._warnings = 0
        self._last_lines: list[str] = []
        self._stopping = False
        self._ended = False
        self.released = False
        """Whether the terminal is given back to the server."""

    @property
    def is_ready(self) -> bool:
        """Returns whether the server serves."""
        return self._phase == len(PHASES)

    def begin(self, title: str) -> None:
        """Shows what starts, and where its log is."""
        self._terminal.line(title, style="bold")
        self._terminal.line(f"  {'log':<11}{self._log}", indent=INDENT, wrap=False)
        self.tick()

    def step(self, event: Mapping[str, Any]) -> None:
        """Shows a step that was reported."""
        name = event.get("step")
        if name == start_events.STOPPING:
            self.stopping()
        elif name == start_events.END:
            self._facts |= {"status": event.get("status"), "reason": event.get("reason")}
        elif name == start_events.RELEASE:
            self.released = True
            self._terminal.line(str(event.get("reason") or ""))
        elif name == "weights_begin":
            self._facts["weights"] = event.get("bytes")
        elif name in PHASES and not self._stopping:
            self._complete(str(name), event)

    def _complete(self, name: str, event: Mapping[str, Any]) -> None:
        index = [*PHASES].index(name)
        if index < self._phase:
            return  # another worker or API server has reported it
        at = float(event.get("at") or 0.0)
        self._row(PHASES[name], at - self._at, self._details(name, event))
        self._phase, self._at = index + 1, at
        if name == "model" and event.get("device"):
            self._row("device", None, f"{event['device']}: {event.get('reason')}")
        if name == "ready":
            self._show_ready(event)
        self.tick()

    def _row(self, label: str, seconds: float | None, details: str) -> None:
        taken = "" if seconds is None else f"{max(seconds, 0.0):.1f} s"
        self._terminal.line(f"  {label:<10}{taken:>8}  {details}".rstrip(), indent=INDENT)

    def _details(self, name: str, event: Mapping[str, Any]) -> str:
        """Returns what is worth knowing of a phase."""
        if name == "imports":
            return ", ".join(f"{kind} {event[key]}" for key, kind in _LIBRARIES if event.get(key))
        if name == "model":
            parts = [event.get("format"), size(event["bytes"]) if event.get("bytes") else None]
            parts += [f"computes in {event['dtype']}" if event.get("dtype") else None]
            parts += [f"{event['context']:,} tokens of context" if event.get("context") else None]
            return f"{event.get('name')}: {', '.join(str(part) for part in parts if part)}"
        if name == "memory":
            return (
                f"{size(event['total'])} of memory, {size(event['free'])} free; weights and KV cache may take "
                f"{size(event['allowed'])}"
            )
        if name == "weights":
            return f"{size(self._facts['weights'])} in memory" if self._facts.get("weights") else ""
        if name == "kv_cache":
            return size(event["bytes"]) if event.get("bytes") else "none"
        return ""

    def _show_ready(self, event: Mapping[str, Any]) -> None:
        for _since, message in self._waiting:
            self._print(message)
        self._waiting.clear()
        write = self._terminal.line
        write()
        write(f"Ready after {float(event.get('at') or 0.0):.1f} s. Ctrl-C stops the server.", style="bold")
        for name, address in address_lines(event):
            write(f"  {name:<9}{address}", indent=11, wrap=not address.startswith("http"))
        if tokens := event.get("kv_cache_tokens"):
            write(f"  {'capacity':<9}{tokens:,} tokens in the KV cache, for all requests together", indent=11)
        write("Try it:")
        for line in curl_lines(event):
            write(line, wrap=False)
        if event.get("key") == "YOUR_API_KEY":
            write("Replace YOUR_API_KEY by the key of --api-key.")
        write()

    def log(self, text: str) -> None:
        """Takes the next part of the log."""
        self._last_lines = [*self._last_lines, *(line for line in text.splitlines() if line.strip())][-3:]
        for message in self._reader.feed(text):
            self._take(message)

    def _take(self, message: Message) -> None:
        if self._stopping or not concerns_user(message):
            return
        if message.level == "WARNING":
            self._print(message)
        else:
            found = self._clock(), message
            self._waiting.append(found)
            self._recent.append(found)

    def _print(self, message: Message) -> None:
        now = self._clock()
        if now - self._printed.get(message.line, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._printed.pop(message.line, None)
        self._printed[message.line] = now
        if len(self._printed) > MOST_REMEMBERED:
            del self._printed[next(iter(self._printed))]
        if not self.is_ready and message.level == "WARNING":
            self._warnings += 1
            if self._warnings > MOST_WARNINGS:
                if self._warnings == MOST_WARNINGS + 1:
                    self._terminal.line("  More warnings are in the log.", style="warning")
                return
        kind = "warning" if message.level == "WARNING" else "error"
        before = f"{self._time_of_day()} " if self.is_ready else "  "
        self._terminal.line(f"{before}{kind}: {fitting(message.line, LONGEST_MESSAGE)}", style=kind, indent=4)

    def tick(self) -> None:
        """Shows the progress of the phase that is under way, and errors that have waited long enough."""
        now = self._clock()
        while self._waiting and now - self._waiting[0][0] >= HELD_SECONDS:
            self._print(self._waiting.pop(0)[1])
        if self.is_ready or self._stopping or self._ended or self.released:
            return
        step, label = [*PHASES.items()][self._phase]
        percent = self._reader.percent if step == "weights" else None
        loaded = f"  {percent} %" if percent is not None else ""
        self._terminal.progress(f"  {label:<10}{max(now - self._began - self._at, 0.0):>6.0f} s{loaded} …")

    def stopping(self) -> None:
        """Shows that the server was asked to stop."""
        if not self._stopping:
            self._stopping = True
            self._waiting.clear()
            self._terminal.line("Stopping…")

    def end(self) -> None:
        """Shows how the server ended."""
        if self.released:
            self._terminal.clear()
            return
        for message in self._reader.finish():
            self._take(message)
        self._ended = True
        self._terminal.clear()
        status, reason = self._facts.get("status"), self._facts.get("reason")
        if status in _SUCCESSES or (self._stopping and status is None):
            self._terminal.line("Stopped.")
            return
        causes = self._causes(reason)
        if not causes:
            how = "was killed, or ended without a message" if status is None else f"ended with status {status}"
            causes = [f"the server {how}; its log ends with:", *self._last_lines]
        first, *more = causes
        self._terminal.line(f"Error: {first}", style="error", indent=2)
        for line in more:
            self._terminal.line(f"  {line}", indent=4)
        self._terminal.line(f"The log of the server is {self._log}", wrap=False)

    def _causes(self, reason: str | None) -> list[str]:
        """Returns the error that ended the server: what the command states, or the first error that follows from no
        other one."""
        earliest = self._clock() - RECENT_SECONDS
        recent = [message for since, message in self._recent if since >= earliest]
        stated = [message.line for message in recent if message.of_command]
        raised = [message.error for message in recent if message.error]
        logged = [message.line for message in recent]
        for found in (stated[::-1], raised, logged, [reason] if reason else []):
            if causes := [one for one in found if not any(part in one for part in _CONSEQUENCES)]:
                return causes[:1]
        return logged[:1]


_LIBRARIES = (("vllm", "vLLM"), ("torch", "PyTorch"))
