"""Loads a model and measures it, in a process of its own: python -m vllm_backplane.bench.measuring_process OWNER PLAN.

PLAN is a JSON file: arguments (those of vLLM's engine), seconds (for the measurements), result (the file to write).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, NoReturn

from vllm_backplane.bench.samples import DECODE, LEAST_OUTPUT, LONG, PREFILL, Point
from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.process.owned_process import ERROR, PROGRESS, USAGE, end_with_owner
from vllm_backplane.settings.vllm_messages import message_of, parser_class

WARM_UP_OUTPUT = 4
MOST_ROUNDS = 9
MOST_TOKENS = max(point.tokens for point in (*PREFILL, *DECODE))
READINGS = 5
"""Number of times that the memory is read, before the measurements and again after them."""
SECONDS_OF_POINT = 0.04
"""Share of the time that one generation of a decode point may take."""


def main() -> None:
    signal.signal(signal.SIGTERM, _end)
    end_with_owner(int(sys.argv[1]))
    plan = json.loads(Path(sys.argv[2]).read_text())
    try:
        found = measure(plan["arguments"], plan["seconds"])
    except BackplaneError as fault:
        print(f"{ERROR}{fault}", flush=True)
        raise SystemExit(USAGE if isinstance(fault, UsageError) else 1) from None
    Path(plan["result"]).write_text(json.dumps(found))
    raise SystemExit(0)


def _end(number: int, _frame: object) -> NoReturn:
    """Lets the exit handlers run: they stop the processes of the engine, which have files in shared memory."""
    raise SystemExit(128 + number)


def measure(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Returns the samples of all points, what the engine runs on, and the load of others meanwhile."""
    from vllm_backplane.bench.other_load import OtherLoad

    began = time.perf_counter()
    engine = start(arguments)
    started = time.perf_counter() - began
    facts = engine.collective_rpc("bench_facts")
    config = engine.vllm_config.model_config
    points = {point for point in (*PREFILL, *DECODE) if point.tokens <= config.max_model_len}
    _progress(f"the engine is ready after {started:.1f} s; measuring for about {seconds:.0f} s")
    load = OtherLoad()
    readings = _read_memory(engine)
    samples = Measurement(engine, [point for point in (*PREFILL, *DECODE) if point in points]).run(seconds)
    readings += _read_memory(engine)
    return {
        "model": config.served_model_name or config.model,
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "max_model_len": config.max_model_len,
        "kv_cache_dtype": engine.vllm_config.cache_config.cache_dtype,
        "workers": facts,
        "samples": samples,
        "readings": readings,
        "other_load": load.shares(),
        "seconds_to_start": started,
        "seconds": time.perf_counter() - began,
    }


def start(arguments: Sequence[str]) -> Any:
    """Returns an engine for the arguments of vLLM's command line, with room for the largest point and no more."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_backplane.settings import compat

    compat.set_up_environment()
    try:
        args = parsed(arguments)
        config = copy(args).create_engine_config()  # a copy, because vLLM writes into its arguments
    except BackplaneError:
        raise
    except (ValueError, OSError) as fault:  # what vLLM raises about its arguments and about a model
        raise BackplaneError(message_of(fault)) from fault
    require_counted_weights(config)
    args.max_model_len = min(MOST_TOKENS, config.model_config.max_model_len)
    args.max_num_seqs = max(point.sequences for point in DECODE)
    args.max_num_batched_tokens = args.max_num_batched_tokens or 2048
    args.enable_prefix_caching = False
    args.disable_log_stats = True
    args.worker_extension_cls = "vllm_backplane.bench.worker_extension.BenchExtension"
    return LLMEngine.from_engine_args(args)


def parsed(arguments: Sequence[str]) -> Any:
    """Returns vLLM's EngineArgs for its command line. Raises UsageError for what is refused."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Without abbreviations, so that the command has seen every option that it does not pass on.
    parser = EngineArgs.add_cli_args(
        parser_class(FlexibleArgumentParser)(prog="vllm-backplane bench", allow_abbrev=False)
    )
    args = EngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    if (args.max_model_len or 0) > MOST_TOKENS:
        raise UsageError(f"--max-model-len: at most {MOST_TOKENS} tokens are measured; remove it, or give a lower one")
    return args


def require_counted_weights(config: Any) -> None:
    """Raises UsageError if a step of the engine would read other weights than are counted, however that was given."""
    unsupported = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size != 1,
        "data parallelism": config.parallel_config.data_parallel_size != 1,
    }
    for what, is_on in unsupported.items():
        if is_on:
            raise UsageError(f"{what} is not supported by this command; remove its options")


def _read_memory(engine: Any) -> list[float]:
    """Returns the bytes per second that all workers read together, for each reading."""
    by_worker = engine.collective_rpc("bench_read_memory", args=(READINGS,))
    return [sum(rates) for rates in zip(*by_worker, strict=True)]


class Measurement:
    """Generates the points in turns, so that a change of the machine's speed reaches all of them."""

    def __init__(self, engine: Any, points: Sequence[Point]) -> None:
        self._engine, self._points = engine, list(points)
        self._vocabulary = engine.vllm_config.model_config.get_vocab_size()
        self._salt = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Returns the figures of all generations by point, for about `seconds`, with one generation at least."""
        end = time.perf_counter() + seconds
        self._points = [self._warmed_up(point, seconds) for point in self._points]
        samples: dict[str, list[dict[str, float]]] = {point.name: [] for point in self._points}
        for _ in range(MOST_ROUNDS):
            began = time.perf_counter()
            for point in self._points:
                samples[point.name].append(self._generate(point))
            if (now := time.perf_counter()) + (now - began) > end:
                break
        return samples

    def _warmed_up(self, point: Point, seconds: float) -> Point:
        """Runs a few tokens of a point, and returns the point with fewer output tokens if they take long."""
        if point.prompt == LONG:
            return point  # the shorter prompt has warmed up the same kernels
        figures = self._generate(_with_output(point, min(point.output, WARM_UP_OUTPUT)))
        if not point.is_decode:
            return point
        fitting = int(figures["decode"] / point.sequences * seconds * SECONDS_OF_POINT)
        return _with_output(point, max(LEAST_OUTPUT, min(point.output, fitting)))

    def _generate(self, point: Point) -> dict[str, float]:
        """Generates all sequences of a point once. The engine's steps are called one by one, so that one generation
        gives the time until every sequence has its first token, and the rate after that."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine = self._engine
        settings = SamplingParams(temperature=0, max_tokens=point.output, ignore_eos=True, detokenize=False)
        self._salt += 1
        began = time.perf_counter()
        for sequence in range(point.sequences):
            shift = self._salt * 131 + sequence * 17
            tokens = [10 + (shift + place * 7) % (self._vocabulary - 20) for place in range(point.prompt)]
            engine.add_request(f"{self._salt}-{sequence}", TokensPrompt(prompt_token_ids=tokens), settings)
        generated: dict[str, int] = {}
        first, before = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                generated[output.request_id] = len(output.outputs[0].token_ids)
            if not first and len(generated) == point.sequences:
                first, before = time.perf_counter(), sum(generated.values())
        ended = time.perf_counter()
        if sum(generated.values()) != point.sequences * point.output:
            raise BackplaneError(
                f"{point.name}: {sum(generated.values())} tokens were generated instead of "
                f"{point.sequences * point.output}; the KV cache may be too small: raise BACKPLANE_MEMORY_SHARE"
            )
        figures = {"first": first - began, "prefill": point.sequences * point.prompt / (first - began)}
        if decoded := sum(generated.values()) - before:
            figures["decode"] = decoded / (ended - first)
        return figures


def _with_output(point: Point, output: int) -> Point:
    return Point(point.name, point.sequences, point.prompt, output)


def _progress(text: str) -> None:
    print(f"{PROGRESS}{text}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # its thread would run during the measurements
    try:
        main()
    except SystemExit as end:
        from vllm_backplane.process.fast_exit import exit_without_teardown

        exit_without_teardown(end.code)
