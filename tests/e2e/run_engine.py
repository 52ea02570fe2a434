"""Runs vLLM engines for the tests, one after another, in a process of its own: run_engine.py JOBS RESULTS [as-it-is].

JOBS is a JSON list. A job has the arguments of one engine and the batches it is to do; the results say what
came out and where it ran. An engine that fails has its traceback as result, with the seconds since it last gave
something and since it was started, and what it left behind; and the next one is tried. Unless vLLM is to be left as it
is, some of what it does is left out that takes time and shows nothing of an engine.
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

from vllm_backplane.cli.serve import exit_without_teardown, use_own_socket_folder

SOON = 0.0002
"""Seconds: far less than a step takes."""
NUDGE = signal.SIGURG
"""Means nothing to anybody, and is ignored where nobody asks for it."""


def chosen(step: dict[int, Any] | None, token: int) -> float | None:
    return None if step is None else step[token].logprob


def describe(output: Any) -> dict[str, Any]:
    """One request's result; the log-probabilities are those of the tokens that are there."""
    first = output.outputs[0]
    result: dict[str, Any] = {
        "token_ids": list(first.token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "finish_reason": first.finish_reason,
    }
    if first.logprobs is not None:
        result["logprobs"] = [chosen(step, token) for step, token in zip(first.logprobs, first.token_ids, strict=True)]
    if output.prompt_logprobs is not None:
        steps = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        result["prompt_logprobs"] = [chosen(step, token) for step, token in steps]
    return result


def generate(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    parameters = SamplingParams(**batch["sampling"])
    prompts = [perceived(ids, batch, place) for place, ids in enumerate(batch["prompts"])]
    if adapters := batch.get("adapters"):
        requests = [adapter(given) if given else None for given in adapters]
        outputs = engine.generate(prompts, parameters, use_tqdm=False, lora_request=requests)
        return [describe(output) for output in outputs]
    groups = [[prompt] for prompt in prompts] if batch.get("one_by_one") else [prompts]
    return [describe(output) for group in groups for output in engine.generate(group, parameters, use_tqdm=False)]


def perceived(ids: list[int], batch: dict[str, Any], place: int) -> Any:
    """A prompt, for the sound that the batch has for it, told by its number."""
    import perceiving

    if sounds := batch.get("sounds"):
        heard = {"audio": (perceiving.sound(sounds[place]), perceiving.RATE)}
        return {
            "encoder_prompt": {"prompt": "", "multi_modal_data": heard},
            "decoder_prompt": {"prompt_token_ids": ids},
        }
    return {"prompt_token_ids": ids}


def adapter(given: list[Any]) -> Any:
    """From name, number and folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(*given)


def refusal(call: Callable[[Any], Any], given: Any) -> str:
    """Empty, or what is said against it."""
    try:
        call(given)
    except Exception as error:  # it is the result
        return str(error)
    return ""


def watch(engine: Any, batch: dict[str, Any], moments: list[float]) -> list[int]:
    """The length of each answer; `moments` gets the time of every token."""
    from vllm import SamplingParams

    parameters = SamplingParams(**batch["sampling"])
    lengths = [0] * len(batch["prompts"])
    for place, ids in enumerate(batch["prompts"]):
        engine.llm_engine.add_request(str(place), {"prompt_token_ids": ids}, parameters)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            moments.append(time.monotonic())
            lengths[int(output.request_id)] = len(output.outputs[0].token_ids)
    return lengths


def interrupted(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """All requests at once, and after some steps those that run lose what was computed for them and start again."""
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
            engine.llm_engine.reset_prefix_cache(reset_running_requests=True)
    return [done[place] for place in range(len(batch["prompts"]))]


def take(engine: Any, step: dict[str, Any], moments: list[float]) -> Any:
    """One step of a job with steps; the key says what it is."""
    [(kind, given)] = step.items()
    match kind:
        case "batch":
            return generate(engine, given)
        case "watch":
            return watch(engine, given, moments)
        case "interrupted":
            return interrupted(engine, given)
        case "sleep":
            return engine.sleep(level=given)
        case "try to sleep":
            return refusal(engine.sleep, given)
        case "wake":
            return engine.wake_up(given)
        case "trace":
            return engine.start_profile() if given else engine.stop_profile()
        case "ask":  # each worker, by a function of worker_questions.py
            import worker_questions

            return engine.collective_rpc(getattr(worker_questions, given))
        case "metrics":  # the values of counters by name
            return {
                metric.name: getattr(metric, "values", None) or metric.value
                for metric in engine.get_metrics()
                if metric.name.startswith(given)
            }
        case "call":  # a method of each worker
            return engine.collective_rpc(given)
        case "save":  # what workers have loaded, in a folder
            return refusal(lambda folder: engine.collective_rpc("save_sharded_state", args=(folder,)), given)
        case "forget prefixes":  # in vLLM's own cache
            return engine.reset_prefix_cache()
        case "load adapter":
            return refusal(engine.llm_engine.add_lora, adapter(given))
        case "pin adapter":
            return engine.llm_engine.pin_lora(given)
        case "remove adapter":
            return engine.llm_engine.remove_lora(given)
        case "list adapters":
            return sorted(engine.llm_engine.list_loras())
    raise ValueError(f"no step {kind!r}")


@contextmanager
def imports_kept() -> Iterator[None]:
    """Without the collector, which would go through all that is being imported again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class KeepsFrozen:
    """The collector, as a module sees it that would undo what was frozen."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def unfreeze(self) -> None:
        pass


def spare_time() -> None:
    """Leaves out what vLLM does again and again where engines follow each other."""
    with imports_kept():
        importlib.import_module("vllm.v1.worker.gpu_worker")  # before engines are forked: each would import it
        importlib.import_module("vllm.entrypoints.llm")
    # vLLM looks at a kind of model that it meets first in a new interpreter, which has to import all of this again.
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()
    # A process that is about to end has the collector go through all that was imported, several times.
    for module in ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"):
        importlib.import_module(module).gc = KeepsFrozen()
    # Workers that wait for each other look again at once, and take the cores from those that compute.
    queues = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    queues.sched_yield = lambda: time.sleep(SOON)
    signal.signal(NUDGE, lambda *_: None)  # engines inherit it, and are interrupted by it


@contextmanager
def nudged() -> Iterator[None]:
    """Engines that are told to end meanwhile notice it. A signal that comes when the last request is done, and the
    engine is about to wait for the next, is seen when something wakes it: nothing does, and after five seconds vLLM
    kills it."""
    engines = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    over = threading.Event()

    def nudge() -> None:
        while not over.wait(0.1):
            for engine in engines:
                with suppress(ProcessLookupError):
                    os.kill(engine, NUDGE)

    thread = threading.Thread(target=nudge)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(job: dict[str, Any], moments: list[float], failed: list[float]) -> dict[str, Any]:
    """What the job gives. `moments` gets the time when its engine is ready, `failed` that of an error after it."""
    from vllm import LLM
    from vllm.platforms import current_platform

    engine = LLM(**job["engine"])
    try:
        moments.append(time.monotonic())
        config = engine.llm_engine.vllm_config
        result: dict[str, Any] = {
            "platform": type(current_platform).__name__,
            "device": current_platform.device_type,
            "worker": config.parallel_config.worker_cls,
            "dtype": str(config.model_config.dtype),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "runner": "second" if config.use_v2_model_runner else "first",
            "batches": [generate(engine, batch) for batch in job.get("batches", ())],
            "steps": [take(engine, step, moments) for step in job.get("steps", ())],
        }
        if "embed" in job:
            outputs = engine.embed(job["embed"], use_tqdm=False)
            result["embeddings"] = [output.outputs.embedding for output in outputs]
    except Exception:
        failed.append(time.monotonic())  # before the engine is shut down, for which nobody waits
        raise
    finally:
        with nudged():
            engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
    return result


def outliving(seconds: float) -> list[str]:
    """Processes of engines that have ended, if they are still there after some time. All are in this one's session."""
    import processes

    end = time.monotonic() + seconds
    while True:
        found = processes.commands_in_session(os.getsid(0), but=os.getpid())
        # Python's own, for as long as this process.
        left = [command for command in found if "resource_tracker" not in command]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def main() -> None:
    jobs, results, *as_it_is = sys.argv[1:]
    use_own_socket_folder()
    done: list[dict[str, Any]] = []
    for job in json.loads(Path(jobs).read_text()):
        print(f"=== engine {len(done)}: {job['engine']}", flush=True)
        moments: list[float] = []
        failed: list[float] = []
        began = time.monotonic()
        try:
            if not as_it_is:
                spare_time()
            done.append(run(job, moments, failed))
        except Exception:  # it is the result
            over = failed[0] if failed else time.monotonic()
            seconds = over - moments[-1] if moments else None
            whole = over - began
            done.append({"error": traceback.format_exc(), "seconds": seconds, "whole": whole})
            print(done[-1]["error"], flush=True)
            done[-1]["left"] = outliving(30)
    Path(results).write_text(json.dumps(done))
    exit_without_teardown(0)  # destroying the interpreter would take seconds


if __name__ == "__main__":
    main()
