"""Measures the perplexity of the default model on a fixed text, by dtype and quantization of the weights.

    python benchmarks/perplexity.py                            # every row
    python benchmarks/perplexity.py float32 int8 int4:64       # these rows; a number after the colon is the group size

The text is perplexity.txt in the same folder, written for this purpose. It is split into independent parts of --context
tokens; the first token of a part is given, and all others are predicted. Each engine runs in a subprocess, in float32
except for the row bfloat16. The row gguf serves the GGUF file, from which the weights of all other rows are made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.compare.machine import describe

TEXT = Path(__file__).with_name("perplexity.txt")
ROWS = ("float32", "bfloat16", "gguf", "int8", "int8:64", "int8:128", "int8:0", "int4", "int4:64", "int4:128", "int4:0")


def engine(model: str, row: str, context: int) -> dict[str, float]:
    """Returns the perplexity and the bytes of the model's tensors. Runs the engine in this process."""
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
        max_model_len=context + 8,
        max_num_seqs=4,
        max_num_batched_tokens=context,
        disable_log_stats=True,
    )
    tokens: list[int] = llm.get_tokenizer().encode(TEXT.read_text())
    parts = [tokens[first : first + context] for first in range(0, len(tokens) - 1, context)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=part) for part in parts], sampling, use_tqdm=False)
    found = [
        step[token].logprob
        for output in outputs
        for step, token in zip(output.prompt_logprobs or (), output.prompt_token_ids or (), strict=True)
        if step is not None
    ]
    assert len(found) == len(tokens) - len(parts)
    return {"perplexity": math.exp(-sum(found) / len(found)), "predicted": len(found), "bytes": weights(llm)}


def weights(llm: object) -> int:
    def count(worker: object) -> int:
        held = {p.data_ptr(): p.nbytes for p in worker.model_runner.get_model().parameters()}  # type: ignore[attr-defined]
        return sum(held.values())

    return sum(llm.collective_rpc(count))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=ROWS, help=f"default: {' '.join(ROWS)}")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", nargs=2, metavar=("MODEL", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        model, result = args.engine
        Path(result).write_text(json.dumps(engine(model, args.rows[0], args.context)))
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
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"  # vLLM writes to standard output
        for row in args.rows:
            command = [sys.executable, str(Path(__file__).resolve()), row, "--context", str(args.context)]
            subprocess.run(
                [*command, "--engine", folder_of[row], str(result)], env=environment, stdout=sys.stderr, check=True
            )
            results[row] = json.loads(result.read_text())
            print(f"{row}: {results[row]['perplexity']:.4f}", file=sys.stderr)
    if args.json:
        about = {"model": FULL_PRECISION.name, "context": args.context, "machine": describe()}
        print(json.dumps({**about, "rows": results}, indent=2))
        return
    first = next(iter(results.values()))
    print(f"\n{FULL_PRECISION.name}, {first['predicted']:.0f} tokens predicted in parts of {args.context}\n")
    print(f"{'weights':<12}{'perplexity':>12}{'against ' + args.rows[0]:>20}{'MB':>8}")
    for row, found in results.items():
        change = 100 * (found["perplexity"] / first["perplexity"] - 1)
        print(f"{row:<12}{found['perplexity']:>12.4f}{change:>+19.2f}%{found['bytes'] / 1e6:>8.0f}")


if __name__ == "__main__":
    main()
