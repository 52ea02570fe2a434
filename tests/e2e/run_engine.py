"""Runs vLLM engines for the tests, one after another, in a separate process: run_engine.py JOBS RESULTS [unmodified].

JOBS is a JSON list. A job has the arguments of one engine, its batches and its steps. Its result has the outputs, and
the platform, device and worker on which it ran.

If an engine fails, its result has the traceback, the seconds since its last output and since its start, and the
processes that it left. The program then goes on with the next job.

Without `unmodified`, the program skips some work of vLLM that takes time and does not affect what the tests check
(`skip_repeated_work`).
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from vllm_backplane.cli.serve import use_own_socket_folder
from vllm_backplane.process.fast_exit import exit_without_teardown

POLL_SECONDS = 0.0002
"""Pause of a worker that waits for another one, far shorter than a step."""
WAKE_SIGNAL = signal.SIGURG
"""Signal that interrupts system calls of an engine. vLLM does not use it, and processes ignore it by default."""


def logprob_of(step: dict[int, Any] | None, token: int) -> float | None:
    """Returns the log-probability of `token` in a step, or None if the step has none."""
    return None if step is None else step[token].logprob


def describe(output: Any) -> dict[str, Any]:
    """Returns the result of one request, with the log-probabilities of its tokens if they were requested."""
    first = output.outputs[0]
    result: dict[str, Any] = {
        "token_ids": list(first.token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": first.finish_reason,
    }
    if first.logprobs is not None:
        result["logprobs"] = [
            logprob_of(step, token) for step, token in zip(first.logprobs, first.token_ids, strict=True)
        ]
    if output.prompt_logprobs is not None:
        steps = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        result["prompt_logprobs"] = [logprob_of(step, token) for step, token in steps]
    return result


def generate(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a batch and returns the results of its requests."""
    from vllm import SamplingParams

    parameters = SamplingParams(**batch["sampling"])
    prompts = [prompt_with_sound(ids, batch, place) for place, ids in enumerate(batch["prompts"])]
    if adapters := batch.get("adapters"):
        requests = [adapter(given) if given else None for given in adapters]
        outputs = engine.generate(prompts, parameters, use_tqdm=False, lora_request=requests)
        return [describe(output) for output in outputs]
    groups = [[prompt] for prompt in prompts] if batch.get("one_by_one") else [prompts]
    return [describe(output) for group in groups for output in engine.generate(group, parameters, use_tqdm=False)]


def prompt_with_sound(ids: list[int], batch: dict[str, Any], place: int) -> Any:
    """Returns the prompt at `place` of a batch, with its sound if the batch has seeds of sounds."""
    import multimodal_models

    if sounds := batch.get("sounds"):
        audio = {"audio": (multimodal_models.sound(sounds[place]), multimodal_models.RATE)}
        return {
            "encoder_prompt": {"prompt": "", "multi_modal_data": audio},
            "decoder_prompt": {"prompt_token_ids": ids},
        }
    return {"prompt_token_ids": ids}


def adapter(given: list[Any]) -> Any:
    """Returns the request for a LoRA adapter from its name, its id and its folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(*given)


def error_of(call: Callable[[Any], Any], given: Any) -> str:
    """Calls a function, and returns the message of its exception, or an empty text if it succeeds."""
    try:
        call(given)
    except Exception as error:  # it is the result
        return str(error)
    return ""


def watch(engine: Any, batch: dict[str, Any], times: list[float]) -> list[int]:
    """Runs a batch and returns the length of each output; appends the time of every token to `times`."""
    from vllm import SamplingParams

    parameters = SamplingParams(**batch["sampling"])
    lengths = [0] * len(batch["prompts"])
    for place, ids in enumerate(batch["prompts"]):
        engine.llm_engine.add_request(str(place), {"prompt_token_ids": ids}, parameters)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            times.append(time.monotonic())
            lengths[int(output.request_id)] = len(output.outputs[0].token_ids)
    return lengths


def interrupted(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a batch, and interrupts it once, after the number of steps that the batch gives: by steps of a job, or by
    preempting all running requests.

    A preempted request loses its KV cache and is computed again.
    """
    from vllm import SamplingParams

    parameters, done = SamplingParams(**batch["sampling"]), {}
    for place, ids in enumerate(batch["prompts"]):
        engine.llm_engine.add_request(str(place), {"prompt_token_ids": ids}, parameters)
    taken = 0
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            done[int(output.request_id)] = describe(output)
        taken += 1
        if taken == batch["after"]:
            if "by" not in batch:
                engine.llm_engine.reset_prefix_cache(reset_running_requests=True)
            for step in batch.get("by", ()):
                run_step(engine, step, [])
    return [done[place] for place in range(len(batch["prompts"]))]


def run_step(engine: Any, step: dict[str, Any], times: list[float]) -> Any:
    """Runs one step of a job and returns its result; the key of the step names its kind."""
    [(kind, given)] = step.items()
    match kind:
        case "batch":
            return generate(engine, given)
        case "watch":
            return watch(engine, given, times)
        case "interrupted":
            return interrupted(engine, given)
        case "shorten file":
            return os.truncate(given, os.path.getsize(given) // 2)
        case "overwrite file":
            return Path(given).write_bytes(bytes(os.path.getsize(given)))
        case "sleep":
            return engine.sleep(level=given)
        case "try to sleep":
            return error_of(engine.sleep, given)
        case "wake":
            return engine.wake_up(given)
        case "trace":
            return engine.start_profile() if given else engine.stop_profile()
        case "rpc":  # calls a function of worker_rpc.py in each worker; a list also has its arguments
            import worker_rpc

            name, *arguments = given if isinstance(given, list) else [given]
            return engine.collective_rpc(getattr(worker_rpc, name), args=tuple(arguments))
        case "metrics":  # the values of counters by name
            return {
                metric.name: getattr(metric, "values", None) or metric.value
                for metric in engine.get_metrics()
                if metric.name.startswith(given)
            }
        case "call":  # a method of each worker; a list also has its arguments
            name, *arguments = given if isinstance(given, list) else [given]
            return engine.collective_rpc(name, args=tuple(arguments))
        case "save":  # the loaded weights of the workers, in a folder
            return error_of(lambda folder: engine.collective_rpc("save_sharded_state", args=(folder,)), given)
        case "forget prefixes":  # clears vLLM's own prefix cache
            return engine.reset_prefix_cache()
        case "load adapter":
            return error_of(engine.llm_engine.add_lora, adapter(given))
        case "pin adapter":
            return engine.llm_engine.pin_lora(given)
        case "remove adapter":
            return engine.llm_engine.remove_lora(given)
        case "list adapters":
            return sorted(engine.llm_engine.list_loras())
    raise ValueError(f"unknown kind of step {kind!r}")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, which would traverse all imported objects repeatedly, and then freezes them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class CollectorWithoutUnfreeze:
    """Replaces the module `gc` for modules that would unfreeze the frozen objects."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def unfreeze(self) -> None:
        pass


def skip_repeated_work() -> None:
    """Changes vLLM so that it does not repeat work for every engine of this process."""
    with collector_paused():
        importlib.import_module("vllm.v1.worker.gpu_worker")  # before the fork, or each engine would import it
        importlib.import_module("vllm.entrypoints.llm")
    # vLLM inspects a new model class in a new interpreter, which would import vLLM again.
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda function: function()
    # A process that is about to end would unfreeze all imported objects, and the collector would traverse them.
    for module in ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.distributed.parallel_state"):
        importlib.import_module(module).gc = CollectorWithoutUnfreeze()
    # Workers that wait for each other would poll without a pause, and take the cores from those that compute.
    queues = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    queues.sched_yield = lambda: time.sleep(POLL_SECONDS)
    signal.signal(WAKE_SIGNAL, lambda *_: None)  # engines inherit the handler, so the signal interrupts them


@contextmanager
def engines_woken() -> Iterator[None]:
    """Wakes the engines repeatedly, so that they handle a signal to end without delay.

    An engine handles a signal that arrives just before it waits for the next request only when something wakes it.
    Nothing does, and vLLM kills the engine after five seconds.
    """
    engines = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    over = threading.Event()

    def wake() -> None:
        while not over.wait(0.1):
            for engine in engines:
                with suppress(ProcessLookupError):
                    os.kill(engine, WAKE_SIGNAL)

    thread = threading.Thread(target=wake)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(job: dict[str, Any], times: list[float], failed: list[float]) -> dict[str, Any]:
    """Runs a job and returns its result.

    Appends the time when the engine is ready to `times`, and the time of a later error to `failed`.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    engine = LLM(**job["engine"])
    try:
        times.append(time.monotonic())
        config = engine.llm_engine.vllm_config
        result: dict[str, Any] = {
            "platform": type(current_platform).__name__,
            "device": current_platform.device_type,
            "worker": config.parallel_config.worker_cls,
            "dtype": str(config.model_config.dtype),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "batches": [generate(engine, batch) for batch in job.get("batches", ())],
            "steps": [run_step(engine, step, times) for step in job.get("steps", ())],
        }
        if "embed" in job:
            outputs = engine.embed(job["embed"], use_tqdm=False)
            result["embeddings"] = [output.outputs.embedding for output in outputs]
    except Exception:
        failed.append(time.monotonic())  # before the shutdown of the engine, which is not part of the time
        raise
    finally:
        # vLLM kills the processes that have not ended in time, and fails if one ends just then.
        with engines_woken(), suppress(psutil.NoSuchProcess):
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
    return result


def remaining_processes(seconds: float) -> list[str]:
    """Returns the command lines of the processes of ended engines that are still alive after some seconds.

    All of them are in the session of this process.
    """
    import processes

    end = time.monotonic() + seconds
    while True:
        found = processes.commands_in_session(os.getsid(0), but=os.getpid())
        # Python's resource tracker lives as long as this process.
        left = [command for command in found if "resource_tracker" not in command]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def main() -> None:
    jobs, results, *unmodified = sys.argv[1:]
    use_own_socket_folder()
    done: list[dict[str, Any]] = []
    for job in json.loads(Path(jobs).read_text()):
        print(f"=== engine {len(done)}: {job['engine']}", flush=True)
        times: list[float] = []
        failed: list[float] = []
        began = time.monotonic()
        try:
            if not unmodified:
                skip_repeated_work()
            done.append(run(job, times, failed))
        except Exception:  # it is the result
            over = failed[0] if failed else time.monotonic()
            seconds = over - times[-1] if times else None
            whole = over - began
            done.append({"error": traceback.format_exc(), "seconds": seconds, "whole": whole})
            print(done[-1]["error"], flush=True)
            done[-1]["left"] = remaining_processes(30)
    Path(results).write_text(json.dumps(done))
    exit_without_teardown(0)  # the normal shutdown of the interpreter would take seconds


if __name__ == "__main__":
    main()
