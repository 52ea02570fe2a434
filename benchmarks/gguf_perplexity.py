"""Measures the perplexity of the default model in each GGUF format, with Backplane and llama.cpp on the same file.

    python -m benchmarks.gguf_perplexity                     # every format; about half an hour on two cores
    python -m benchmarks.gguf_perplexity Q4_0 "Q2_K, down"   # these formats; earlier results of the others are kept
    python -m benchmarks.gguf_perplexity BF16 --ours-alone   # earlier results of llama.cpp are kept
    python -m benchmarks.gguf_perplexity --json

`llama-quantize` writes the files, as they are published: a name such as Q4_K_M stands for types by tensor. Where a row
is not a multiple of the type's block (the rows of 576 of this model are not multiples of 256), llama-quantize uses
another type. `llama-perplexity` splits perplexity.txt into parts of 512 tokens and counts the second half of each part;
Backplane counts the same tokens. Files in half precision are served in their dtype, as `vllm serve` does, and the
others in float32, so that only the weights differ. Results are kept in results/gguf-perplexity.json, from which
docs/generate.py makes a table of docs/serve/checkpoints.md.
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
from benchmarks.compare.environments import LLAMA_CPP, Environments, log
from benchmarks.compare.machine import describe
from benchmarks.compare.subjects import find
from benchmarks.compare.variants import GGUF_FORMATS

HERE = Path(__file__).resolve().parent
TEXT = HERE / "perplexity.txt"
RESULTS = HERE / "results" / "gguf-perplexity.json"
PART = 512
MIXED = {"Q2_K, down": ("Q2_K", "ffn_down=q2_k")}
"""Formats of our own: the format for llama-quantize, and the type of some matrices. In this model only `ffn_down`, with
1536 inputs, can be in Q2_K, and llama-quantize's format of that name has it in Q3_K."""
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M",
           "Q2_K", *MIXED)  # fmt: skip
ORIGIN = ("machine", "date", "commit")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def ours(file: str, dtype: str) -> dict[str, float]:
    """Returns Backplane's perplexity over the tokens that llama-perplexity counts. Runs the engine in this process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(file, dtype=dtype, max_model_len=PART + 8, max_num_seqs=4, max_num_batched_tokens=PART)
    tokens: list[int] = llm.get_tokenizer().encode(TEXT.read_text())
    parts = [tokens[first : first + PART] for first in range(0, len(tokens) - PART + 1, PART)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: list[float] = []
    for output in llm.generate([TokensPrompt(prompt_token_ids=part) for part in parts], sampling, use_tqdm=False):
        steps = list(zip(output.prompt_logprobs or (), output.prompt_token_ids or (), strict=True))
        found += [step[token].logprob for step, token in steps[PART // 2 + 1 :] if step is not None]
    return {"perplexity": math.exp(-sum(found) / len(found)), "tokens": len(found)}


def llama_cpp(program: Path, file: Path) -> dict[str, float]:
    command = [program, "-m", file, "-f", TEXT, "-c", str(PART), "-b", str(PART), "-t", str(os.cpu_count())]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    output = done.stdout + done.stderr
    estimate = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
    counted = re.search(r"calculating perplexity over (\d+) chunks", output)
    if estimate is None or counted is None:
        raise RuntimeError(f"the output of llama-perplexity has no result; it ends with: {output[-500:]}")
    return {"perplexity": float(estimate[1]), "tokens": int(counted[1]) * (PART // 2 - 1)}


def measure(kind: str, environments: Environments, folder: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Measures one format. `before` is an earlier result whose llama.cpp figure is kept; None measures it too."""
    source = find("smollm2").gguf("F32", log)
    file = folder / f"{kind}.gguf"
    if kind == "F32":
        file = source
    else:
        quantization, *types = MIXED.get(kind, (kind,))
        options = [word for one in types for word in ("--tensor-type", one)]
        gguf_files.quantized(environments.llama_cpp("llama-quantize"), source, file, quantization, options)
    peer = None if before else llama_cpp(environments.llama_cpp("llama-perplexity"), file)
    dtype = GGUF_FORMATS[kind][1] if kind in GGUF_FORMATS else "float32"
    result = folder / "result.json"  # vLLM writes to standard output
    command = [sys.executable, str(Path(__file__).resolve()), "--file", str(file), dtype, str(result)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, cwd=HERE.parent, stdout=sys.stderr, check=True)
    own = json.loads(result.read_text())
    if peer and own["tokens"] != peer["tokens"]:
        raise RuntimeError(f"{kind}: llama-perplexity counted {peer['tokens']} tokens, Backplane {own['tokens']}")
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
    """Returns the origin of the llama.cpp figure of an earlier result, which may itself have kept an older figure."""
    return before.get("llama.cpp measured") or {name: before[name] for name in ORIGIN}


def origin() -> dict[str, Any]:
    """Returns the machine, date and commit of a measurement made now."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    commit = done.stdout.strip() or "unknown commit"
    found = (describe()["class"], datetime.now(UTC).date().isoformat(), commit)
    return dict(zip(ORIGIN, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"default: {' '.join(FORMATS)}")
    parser.add_argument("--environments", type=Path, default=HERE.parent, help="folder of the peers' environments")
    parser.add_argument("--ours-alone", action="store_true", help="keep the earlier figures of llama.cpp")
    parser.add_argument("--json", action="store_true", help="print all results as JSON instead of a table")
    parser.add_argument("--file", nargs=3, metavar=("GGUF", "DTYPE", "RESULT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        file, dtype, result = args.file
        Path(result).write_text(json.dumps(ours(file, dtype)))
        return
    if unknown := set(args.formats) - set(FORMATS):
        parser.error(f"unknown format {', '.join(sorted(unknown))}; formats: {' '.join(FORMATS)}")
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"formats": {}}
    if args.ours_alone and (new := [kind for kind in args.formats or FORMATS if kind not in known["formats"]]):
        parser.error(f"there is no earlier llama.cpp figure of {', '.join(new)}; remove --ours-alone")
    now = origin()  # before this program changes the results, which would make the commit dirty
    for kind in args.formats or FORMATS:
        before = known["formats"][kind] if args.ours_alone else None
        with tempfile.TemporaryDirectory() as folder:
            known["formats"][kind] = measure(kind, Environments(args.environments), Path(folder), before) | now
        log(f"{kind}: {known['formats'][kind]}")
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
