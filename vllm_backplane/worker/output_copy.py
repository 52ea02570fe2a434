"""Makes later work on a card wait until an output that vLLM discards has been copied to the host."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput


def wait_for_output_copy(output: Any) -> None:
    """Makes later work on the current stream wait for the copy of an output that vLLM discards.

    vLLM copies an output to the host on a separate stream. On a rank whose output is not read, it drops the output, and
    with it the source tensors, during that copy: their memory would be reused and overwritten. On the output rank the
    reader waits for the copy.
    """
    if not isinstance(output, AsyncModelRunnerOutput):
        return
    for name in ("async_copy_ready_event", "copy_event"):  # of the V1 and of the V2 model runner
        if (event := getattr(output, name, None)) is not None:
            event.wait()
            return
    output.get_output()
