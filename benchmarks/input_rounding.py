"""Measures what the rounding of linear layers' inputs to 8 bits costs the default model, and which values cause it.

    python benchmarks/input_rounding.py                          # some minutes on two cores
    python benchmarks/input_rounding.py --tokens 256 --exact 1 4 16
    python benchmarks/input_rounding.py --samples chat --json

The model runs in PyTorch with its float32 weights. Before every linear layer, the head too, the input is rounded by the
reference of the operator `quantized_linear`: to 8 bits, one scale per row and group. Nothing else is rounded, so the
figures are those of the method, not of a kernel. Variants leave some values as they are ("exact"); the scales of the
groups then come from the other values:

- all rounded: nothing is exact.
- position 0 exact: the row of each part's first token.
- K columns exact: the K columns of each input that are largest in the mean, on text that is held out. The inputs of
  layers that read the same tensor (queries, keys and values; gate and up) have the same columns.
- K values exact: the K largest values of each row.

Samples are parts of perplexity.txt, whose first paragraphs are held out: sentences, sentences as chat messages
("chat"), or parts of a number of tokens. The change of the perplexity is against the model without rounding. Both
predict the same tokens, so the standard error is that of a mean difference per token, with tokens taken as independent.
The KL divergence, from the distribution without rounding to that with it, is the mean over the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.compare.machine import describe
from benchmarks.perplexity import TEXT, Part, change_of, parts_of
from vllm_backplane.ops.quantized_linear import padded_size, quantized_rows

SAMPLES = ("sentences", "16", "512")
HELD_OUT = 3
"""Number of paragraphs on which columns are chosen."""
LONGEST = 512
"""Number of tokens of the longest part, and of those that run at once."""

Variant = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns what linear layers read, from the name of an input and the input, [parts, positions, columns]."""


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Returns the last dimension rounded to 8 bits in groups, as the operator rounds its input."""
    columns = x.shape[-1]
    padded = padded_size(columns, group)
    return quantized_rows(x.reshape(-1, columns), padded // (group or padded), padded)[:, :columns].view(x.shape)


def rounded_except(x: torch.Tensor, exact: torch.Tensor, group: int) -> torch.Tensor:
    """Returns x rounded, except where `exact` is set. The scales come from the values that are rounded."""
    return torch.where(exact, x, rounded(x.masked_fill(exact, 0), group))


def first_position(x: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the first position of every part of x, [parts, positions, columns]."""
    return (torch.arange(x.shape[1]) == 0).view(1, -1, 1).expand_as(x)


def chosen_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns a mask of these columns."""
    mask = torch.zeros(x.shape[-1], dtype=torch.bool)
    mask[columns] = True
    return mask.expand_as(x)


def largest_values(x: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a mask of the values with the largest magnitudes of each row."""
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.abs().topk(min(count, x.shape[-1]), -1).indices, True)


class Columns(NamedTuple):
    """Holds the columns of an input with the largest mean magnitudes, the largest first."""

    columns: list[int]
    ratios: list[float]
    """Of their mean magnitudes to the median column's."""


def largest_columns(magnitudes: torch.Tensor, count: int) -> Columns:
    """Returns the largest of the columns' mean magnitudes."""
    found = magnitudes.topk(min(count, len(magnitudes)))
    ratios = found.values / magnitudes.median()
    return Columns(found.indices.tolist(), ratios.tolist())


def bounded(parts: Sequence[Part], tokens: int) -> list[Part]:
    """Returns the first parts, until so many tokens count. The first part is always among them."""
    taken: list[Part] = []
    for part in parts:
        if taken and sum(len(one.counted) for one in taken) + len(part.counted) > tokens:
            break
        taken.append(part)
    return taken


def batches(parts: Sequence[Part], tokens: int) -> Iterator[list[Part]]:
    """Yields parts of similar lengths that run at once: together at most `tokens` tokens, filled to equal lengths."""
    batch: list[Part] = []
    for part in sorted(parts, key=lambda one: len(one.tokens)):
        if batch and (len(batch) + 1) * len(part.tokens) > tokens:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


class Measured(NamedTuple):
    """Holds the cost of rounding on a sample."""

    change: float
    """Of the perplexity, relative."""
    error: float
    divergence: float
    divergence_error: float


def measured(base: Sequence[float], other: Sequence[float], divergences: Sequence[float]) -> Measured:
    """Returns the cost, from log-probabilities and KL divergences per token."""
    error = statistics.stdev(divergences) / math.sqrt(len(divergences)) if len(divergences) > 1 else math.nan
    return Measured(*change_of(base, other), statistics.fmean(divergences), error)


class Model:
    """Runs a model whose linear layers read changed inputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()
        self.variant: Variant | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(partial(self._changed, name.removeprefix("model.")))

    def _changed(self, name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        """Changes a tensor once, though several layers read it; the first gives the input its name."""
        (x,) = inputs
        if self.variant is None:
            return (x,)
        if self._last is None or self._last[0] is not x:
            self._last = (x, self.variant(name, x))
        return (self._last[1],)

    @torch.inference_mode()
    def predictions(self, parts: Sequence[Part], variant: Variant | None) -> torch.Tensor:
        """Returns log-probabilities of all tokens, [counted tokens, vocabulary]."""
        longest = max(len(part.tokens) for part in parts)
        # What fills a part stands behind it, where attention does not look.
        tokens = torch.tensor([part.tokens + [0] * (longest - len(part.tokens)) for part in parts])
        self.variant = variant
        logits = self.model(input_ids=tokens, use_cache=False).logits
        self.variant = self._last = None
        # The prediction of a token is made at the place before it.
        places = [range(part.counted.start - 1, part.counted.stop - 1) for part in parts]
        rows = [one[place.start : place.stop] for one, place in zip(logits, places, strict=True)]
        return torch.cat(rows).log_softmax(-1)

    def magnitudes(self, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """Returns the mean magnitudes of the columns of every input. First positions are left out: they differ."""
        sums: dict[str, torch.Tensor] = {}

        def add(name: str, x: torch.Tensor) -> torch.Tensor:
            sums[name] = sums.get(name, 0) + x[:, 1:].abs().sum((0, 1))
            return x

        for part in parts:  # one at a time: what fills a part would count
            self.predictions([part], add)
        rows = sum(len(part.tokens) - 1 for part in parts)
        return {name: total / rows for name, total in sums.items()}


def variants_of(largest: dict[str, list[int]], exact: Sequence[int], group: int) -> dict[str, Variant]:
    """Returns the variants. `largest` has the columns of each input, the largest first."""
    variants: dict[str, Variant] = {
        "all rounded": lambda name, x: rounded(x, group),
        "position 0 exact": lambda name, x: rounded_except(x, first_position(x), group),
    }
    for count in exact:
        columns = {name: torch.tensor(found[:count]) for name, found in largest.items()}
        variants[f"{count} columns exact"] = partial(_except_columns, columns, group)
        variants[f"{count} values exact"] = partial(_except_values, count, group)
    return variants


def _except_columns(columns: dict[str, torch.Tensor], group: int, name: str, x: torch.Tensor) -> torch.Tensor:
    return rounded_except(x, chosen_columns(x, columns[name]), group)


def _except_values(count: int, group: int, name: str, x: torch.Tensor) -> torch.Tensor:
    return rounded_except(x, largest_values(x, count), group)


def cost(model: Model, parts: Sequence[Part], variants: dict[str, Variant]) -> dict[str, Any]:
    """Returns the perplexity without rounding, and what each variant costs."""
    base: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in variants}
    divergences: dict[str, list[float]] = {name: [] for name in variants}
    for batch in batches(parts, LONGEST):
        right = torch.tensor([part.tokens[place] for part in batch for place in part.counted]).unsqueeze(1)
        plain = model.predictions(batch, None)
        base += plain.gather(1, right).squeeze(1).tolist()
        for name, variant in variants.items():
            found = model.predictions(batch, variant)
            others[name] += found.gather(1, right).squeeze(1).tolist()
            divergences[name] += (plain.exp() * (plain - found)).sum(-1).tolist()
    return {
        "perplexity": math.exp(-statistics.fmean(base)),
        "predicted": len(base),
        "parts": len(parts),
        "variants": {name: measured(base, others[name], divergences[name])._asdict() for name in variants},
    }


def sample_parts(tokenizer: Any, sample: str, text: str) -> list[Part]:
    named = sample in ("sentences", "chat")
    return parts_of(tokenizer, sample if named else "context", 0 if named else int(sample), text)


def sample_name(text: str) -> str:
    if text not in ("sentences", "chat") and not (text.isdecimal() and 2 <= int(text) <= LONGEST):
        raise argparse.ArgumentTypeError(f"'{text}' is not 'sentences', 'chat' or a number from 2 to {LONGEST}")
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", nargs="+", type=sample_name, default=SAMPLES, metavar="SAMPLE",
        help=f"sentences, chat, or the tokens of a part (default: {' '.join(SAMPLES)})",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=positive, default=2048, help="most tokens of a sample that count (default: 2048)"
    )
    parser.add_argument(
        "--exact",
        nargs="+",
        type=positive,
        default=[4],
        metavar="K",
        help="numbers of exact columns and values (default: 4)",
    )
    parser.add_argument(
        "--group", type=int, default=32, help="columns that share a scale; 0 is the whole row (default: 32)"
    )
    parser.add_argument(
        "--inputs", type=positive, default=8, help="inputs that are listed by their columns (default: 8)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.group < 0:
        parser.error("--group: a group has at least one column, and 0 is the whole row")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_backplane.models import FULL_PRECISION, obtain

    folder = str(obtain(FULL_PRECISION.name))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    paragraphs = TEXT.read_text().split("\n\n")
    held_out, text = "\n\n".join(paragraphs[:HELD_OUT]), "\n\n".join(paragraphs[HELD_OUT:])
    magnitudes = model.magnitudes(parts_of(tokenizer, "context", LONGEST, held_out))
    largest = {name: largest_columns(found, max(3, *args.exact)) for name, found in magnitudes.items()}
    variants = variants_of({name: found.columns for name, found in largest.items()}, args.exact, args.group)
    samples: dict[str, dict[str, Any]] = {}
    for sample in args.samples:
        began = time.monotonic()
        samples[sample] = cost(model, bounded(sample_parts(tokenizer, sample, text), args.tokens), variants)
        print(f"{sample}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    listed = sorted(largest, key=lambda name: -largest[name].ratios[0])[: args.inputs]
    if args.json:
        about = {"model": FULL_PRECISION.name, "group": args.group, "held out": HELD_OUT, "machine": describe()}
        inputs = {name: largest[name]._asdict() for name in listed}
        print(json.dumps({**about, "samples": samples, "inputs": inputs}, indent=2))
        return
    print(f"\n{FULL_PRECISION.name}, inputs in 8 bits, groups of {args.group}; ± is the standard error")
    for sample, found in samples.items():
        name = f"parts of {sample} tokens" if sample.isdecimal() else sample
        print(f"\n{name}: {found['parts']} parts, {found['predicted']} tokens, perplexity {found['perplexity']:.3f}")
        for variant, values in found["variants"].items():
            print(
                f"  {variant:<20}{100 * values['change']:>+7.2f} % ± {100 * values['error']:.2f}"
                f"{values['divergence']:>12.5f} KL ± {values['divergence_error']:.5f}"
            )
    print("\nInputs by their largest columns (column: mean magnitude, as a multiple of the median column's)")
    for name in listed:
        pairs = zip(largest[name].columns[:3], largest[name].ratios[:3], strict=True)
        print(f"  {name:<28}" + "".join(f"{f'{column}: {ratio:.1f}':>14}" for column, ratio in pairs))


if __name__ == "__main__":
    main()
