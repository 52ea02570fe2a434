"""Perplexity of the default model in each GGUF format, ours beside llama.cpp's on the same file.

    python -m benchmarks.gguf_perplexity                     # every format; about half an hour on two cores
    python -m benchmarks.gguf_perplexity Q4_0 "Q2_K, down"   # these; the others keep what was measured before
    python -m benchmarks.gguf_perplexity BF16 --ours-alone   # llama.cpp keeps what was measured before
    python -m benchmarks.gguf_perplexity --json

`llama-quantize` makes the files, as people have them: a name such as Q4_K_M means types by tensor, and where a row is
no multiple of the type's block (this model's rows of 576 are none of 256) another type stands in. `llama-perplexity`
reads the text of perplexity.txt in parts of 512 tokens and counts the second half of each; ours counts the same tokens.
Files in half precision are served in it, as `vllm serve` does it; the others in float32, so that what is measured is
their weights. What was found is kept in results/gguf-perplexity.json, from which docs/generate.py makes a table of
docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compare import gguf_files
from benchmarks.compare.environments import LLAMA_CPP, Environments, say
from benchmarks.compare.machine import describe
from benchmarks.compare.subjects import find
from benchmarks.compare.variants import GGUF_FORMATS

HERE = Path(__file__).resolve().parent
TEXT = HERE / "perplexity.txt"
RESULTS = HERE / "results" / "gguf-perplexity.json"
PART = 512
MIXED = {"Q2_K, down": ("Q2_K", "ffn_down=q2_k")}
"""Formats that have no name: what llama-quantize is asked for, and the type of some matrices. Of this model only those
of `ffn_down`, with 1536 inputs, can be in Q2_K, and the format of that name has them in Q3_K."""
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M",
           "Q2_K", *MIXED)  # fmt: skip
ORIGIN = ("machine", "date", "commit")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def ours(file: str, dtype: str) -> dict[str, float]:
    """Over the tokens that llama-perplexity counts, in this process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(file, dtype=dtype, max_model_len=PART + 8, max_num_seqs=4, max_num_batched_tokens=PART)
    tokens: list[int] = llm.get_tokenizer().encode(TEXT.read_text())
    parts = [tokens[first : first + PART] for first in range(0, len(tokens) - PART + 1, PART)]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for output in llm.generate([TokensPrompt(prompt_token_ids=part) for part in parts], asked, use_tqdm=False):
        steps = list(zip(output.prompt_logprobs or (), output.prompt_token_ids or (), strict=True))
        found += [step[token].logprob for step, token in steps[PART // 2 + 1 :] if step is not None]
    return {"perplexity": math.exp(-sum(found) / len(found)), "tokens": len(found)}


def llama_cpp(program: Path, file: Path) -> dict[str, float]:
    command = [program, "-m", file, "-f", TEXT, "-c", str(PART), "-b", str(PART), "-t", str(os.cpu_count())]
    told = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    said = told.stdout + told.stderr
    estimate = re.search(r"Final estimate: PPL = ([0-9.]+)", said)
    counted = re.search(r"calculating perplexity over (\d+) chunks", said)
    if estimate is None or counted is None:
        raise RuntimeError(f"llama-perplexity did not say what it found; its last words: {said[-500:]}")
    return {"perplexity": float(estimate[1]), "tokens": int(counted[1]) * (PART // 2 - 1)}


def measure(kind: str, environments: Environments, folder: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """`before`: a row whose figure of llama.cpp stays."""
    source = find("smollm2").gguf("F32", say)
    file = folder / f"{kind}.gguf"
    if kind == "F32":
        file = source
    else:
        asked, *types = MIXED.get(kind, (kind,))
        options = [word for one in types for word in ("--tensor-type", one)]
        gguf_files.quantized(environments.llama_cpp("llama-quantize"), source, file, asked, options)
    peer = None if before else llama_cpp(environments.llama_cpp("llama-perplexity"), file)
    dtype = GGUF_FORMATS[kind][1] if kind in GGUF_FORMATS else "float32"
    answer = folder / "answer.json"  # standard output belongs to vLLM
    command = [sys.executable, str(Path(__file__).resolve()), "--file", str(file), dtype, str(answer)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, cwd=HERE.parent, stdout=sys.stderr, check=True)
    own = json.loads(answer.read_text())
    if peer and own["tokens"] != peer["tokens"]:
        raise RuntimeError(f"{kind}: llama-perplexity counted {peer['tokens']} tokens, ours {own['tokens']}")
    types = sorted(gguf_files.weights_by_type(file))
    return {
        "ours": own["perplexity"],
        "dtype": dtype,
        "llama.cpp": peer["perplexity"] if peer else before["llama.cpp"],
        "types": types,
        "bytes": file.stat().st_size,
        **({"llama.cpp measured": peer_origin(before)} if before else {}),
    }


def peer_origin(before: Mapping[str, Any]) -> dict[str, Any]:
    """Where llama.cpp's figure of an earlier run is from: that run, or one before it."""
    return before.get("llama.cpp measured") or {name: before[name] for name in ORIGIN}


def origin() -> dict[str, Any]:
    """Of what is measured now."""
    command = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    commit = told.stdout.strip() or "unknown commit"
    found = (describe()["class"], datetime.now(UTC).date().isoformat(), commit)
    return dict(zip(ORIGIN, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"default: {' '.join(FORMATS)}")
    parser.add_argument("--environments", type=Path, default=HERE.parent, help="folder of the peers' environments")
    parser.add_argument("--ours-alone", action="store_true", help="leave llama.cpp's figures as they are")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON instead of a table")
    parser.add_argument("--file", nargs=3, metavar=("GGUF", "DTYPE", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        file, dtype, answer = args.file
        Path(answer).write_text(json.dumps(ours(file, dtype)))
        return
    if unknown := set(args.formats) - set(FORMATS):
        parser.error(f"{', '.join(sorted(unknown))} not known; formats: {' '.join(FORMATS)}")
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"formats": {}}
    if args.ours_alone and (new := [kind for kind in args.formats or FORMATS if kind not in known["formats"]]):
        parser.error(f"llama.cpp's figure of {', '.join(new)} is not known; leave --ours-alone out")
    now = origin()  # before the results change
    for kind in args.formats or FORMATS:
        before = known["formats"][kind] if args.ours_alone else None
        with tempfile.TemporaryDirectory() as folder:
            known["formats"][kind] = measure(kind, Environments(args.environments), Path(folder), before) | now
        say(f"{kind}: {known['formats'][kind]}")
        known |= {"llama.cpp": LLAMA_CPP, "part": PART}
        known["formats"] = {one: known["formats"][one] for one in FORMATS if one in known["formats"]}
        RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    if args.json:
        print(json.dumps(known, indent=2))
        return
    print(f"{'format':<12}{'ours':>10}{'llama.cpp':>11}{'ours / llama.cpp':>18}")
    for kind, found in known["formats"].items():
        print(f"{kind:<12}{found['ours']:>10.3f}{found['llama.cpp']:>11.3f}{found['ours'] / found['llama.cpp']:>18.4f}")


if __name__ == "__main__":
    main()
