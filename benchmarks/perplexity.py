"""Measures the perplexity of the default model on a fixed text, by dtype and quantization of the weights.

    python benchmarks/perplexity.py                            # every row
    python benchmarks/perplexity.py float32 int8 int4:64       # these rows; a number after the colon is the group size

The text is perplexity.txt in the same folder, written for this purpose. It is split into independent parts of --context
tokens; the first token of a part is given, and all others are predicted. With --sentences, every sentence is a part,
and with --chat every sentence is the message of a user, in the model's chat template; tokens of the template are given,
and only those of the sentence count. Each engine runs in a subprocess, in float32 except for the row bfloat16. The row
gguf serves the GGUF file, from which the weights of all other rows are made.

The change against the first row has a standard error: both rows predict the same tokens, so it is the error of the
mean difference of their log-probabilities, with tokens taken as independent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.machine import describe

TEXT = Path(__file__).with_name("perplexity.txt")
ROWS = ("float32", "bfloat16", "gguf", "int8", "int8:64", "int8:128", "int8:0", "int4", "int4:64", "int4:128", "int4:0")


class Part(NamedTuple):
    """Holds the tokens of a prompt, and which of them count."""

    tokens: list[int]
    counted: range
    """Places of the predicted tokens that count; the first token of a prompt is never one."""


class Change(NamedTuple):
    """Holds a relative change of the perplexity, and its standard error."""

    change: float
    error: float


def parts_of(tokenizer: Any, split: str, context: int, text: str | None = None) -> list[Part]:
    """Returns the parts into which the text is split: 'context', 'sentences' or 'chat'. The default is TEXT's."""
    text = TEXT.read_text() if text is None else text
    if split == "context":
        tokens: list[int] = tokenizer.encode(text)
        return [whole(tokens[first : first + context]) for first in range(0, len(tokens) - 1, context)]
    sentences = [found for found in re.split(r"(?<=[.?!])\s+", text.strip()) if len(found.split()) > 4]
    if split == "sentences":
        return [whole(tokenizer.encode(sentence)) for sentence in sentences]
    return [message(tokenizer, sentence) for sentence in sentences]


def whole(tokens: list[int]) -> Part:
    """Returns a part in which every token but the first counts."""
    return Part(tokens, range(1, len(tokens)))


def message(tokenizer: Any, sentence: str) -> Part:
    """Returns a sentence as the message of a user, in the model's chat template. Only the sentence's tokens count."""
    prompt: str = tokenizer.apply_chat_template([{"role": "user", "content": sentence}], tokenize=False)
    begin = prompt.rindex(sentence)
    encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    return Part(encoded["input_ids"], tokens_within(encoded["offset_mapping"], begin, begin + len(sentence)))


def tokens_within(offsets: Sequence[tuple[int, int]], begin: int, end: int) -> range:
    """Returns the places of the tokens that have a character from `begin` to `end`. Offsets are of characters."""
    places = [place for place, (first, last) in enumerate(offsets) if first < end and last > begin and place > 0]
    return range(places[0], places[-1] + 1) if places else range(0)


def change_of(base: Sequence[float], other: Sequence[float]) -> Change:
    """Returns the change of the perplexity from log-probabilities of the same tokens, one by one."""
    losses = [one - two for one, two in zip(base, other, strict=True)]
    ratio = math.exp(statistics.fmean(losses))
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    return Change(ratio - 1, ratio * error)


def engine(model: str, row: str, split: str, context: int) -> dict[str, Any]:
    """Returns log-probabilities of the tokens and the bytes of the model's tensors. Runs the engine in this process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    name, _, group = row.partition(":")
    full = name in ("float32", "bfloat16", "gguf")
    if group:
        os.environ["BACKPLANE_QUANTIZATION_GROUP"] = group
    llm = LLM(
        model,
        dtype="bfloat16" if name == "bfloat16" else "float32",
        quantization=None if full else name,
        max_model_len=max(context, 512) + 8,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        disable_log_stats=True,
    )
    parts = parts_of(llm.get_tokenizer(), split, context)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [TokensPrompt(prompt_token_ids=part.tokens) for part in parts]
    found = []
    for part, output in zip(parts, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        steps = output.prompt_logprobs or []
        assert output.prompt_token_ids == part.tokens and len(steps) == len(part.tokens)
        found += [steps[place][part.tokens[place]].logprob for place in part.counted]
    return {"log-probabilities": found, "bytes": weights(llm)}


def weights(llm: object) -> int:
    def count(worker: object) -> int:
        held = {p.data_ptr(): p.nbytes for p in worker.model_runner.get_model().parameters()}  # type: ignore[attr-defined]
        return sum(held.values())

    return sum(llm.collective_rpc(count))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=ROWS, help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--context", type=int, default=512, help="tokens of a part (default: 512)")
    splits = parser.add_mutually_exclusive_group()
    for flag, part in {"--sentences": "a part", "--chat": "the message of a user"}.items():
        splits.add_argument(
            flag, dest="split", action="store_const", const=flag.removeprefix("--"), help=f"every sentence is {part}"
        )
    parser.set_defaults(split="context")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=2, metavar=("MODEL", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, result = args.engine
        Path(result).write_text(json.dumps(engine(model, args.rows[0], args.split, args.context)))
        return
    from vllm_backplane.models import FULL_PRECISION, obtain

    folder_of = {row: str(obtain("smollm2" if row == "gguf" else FULL_PRECISION.name)) for row in args.rows}
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `weights` needs the worker in the engine's process
    }
    results: dict[str, dict[str, float]] = {}
    base: list[float] = []  # log-probabilities in the first row
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"  # vLLM writes to standard output
        for row in args.rows:
            command = [sys.executable, str(Path(__file__).resolve()), row, "--context", str(args.context)]
            command += [] if args.split == "context" else [f"--{args.split}"]
            subprocess.run(
                [*command, "--engine", folder_of[row], str(result)], env=environment, stdout=sys.stderr, check=True
            )
            measured = json.loads(result.read_text())
            found: list[float] = measured["log-probabilities"]
            base = base or found
            results[row] = {"perplexity": math.exp(-statistics.fmean(found)), "predicted": len(found)}
            results[row] |= {"bytes": measured["bytes"], **change_of(base, found)._asdict()}
            print(f"{row}: {results[row]['perplexity']:.4f}", file=sys.stderr)
    if args.json:
        about = {"model": FULL_PRECISION.name, "split": args.split, "context": args.context, "machine": describe()}
        print(json.dumps({**about, "rows": results}, indent=2))
        return
    first = next(iter(results.values()))
    size = f"parts of {args.context} tokens" if args.split == "context" else args.split
    print(f"\n{FULL_PRECISION.name}, {first['predicted']:.0f} tokens predicted, {size}\n")
    print(f"{'weights':<12}{'perplexity':>12}{'against ' + args.rows[0]:>20}{'standard error':>17}{'MB':>8}")
    for row, values in results.items():
        print(
            f"{row:<12}{values['perplexity']:>12.4f}{100 * values['change']:>+19.2f}%{100 * values['error']:>16.2f}%"
            f"{values['bytes'] / 1e6:>8.0f}"
        )


if __name__ == "__main__":
    main()
