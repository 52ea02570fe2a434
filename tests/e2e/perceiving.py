"""Tiny models that read more than a prompt (pairs of texts, sound, pictures), and what they are given to read.

Processors and tokenizers are made here as well, of a few letters, so that nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy

RATE = 16000
SECONDS = 2
SIDE = 28
"""Pixels of a picture."""
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz .,?!")
SPOKEN_FIRST = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
"""What vLLM has Whisper continue when a request says that the language is English."""
WORDS = 512 - len(SPOKEN_FIRST) - 1
"""Of Whisper: the token of each is its number; the special ones follow."""
FIRST = list(range(WORDS, WORDS + len(SPOKEN_FIRST)))
"""Their tokens."""


def sound(seed: int) -> numpy.ndarray:
    """Less than a chunk of two tones and noise."""
    random = numpy.random.default_rng(seed)
    time = numpy.arange(RATE * SECONDS * 3 // 4) / RATE
    tones = sum(numpy.sin(2 * numpy.pi * pitch * time) for pitch in random.uniform(100, 3000, 2))
    return (0.2 * tones + 0.05 * random.standard_normal(time.shape)).astype(numpy.float32)


def recorded(seed: int) -> numpy.ndarray:
    """The same in steps of 16 bits, as a file has it."""
    return (sound(seed) * 32768).round().astype(numpy.int16)


def as_file(steps: numpy.ndarray) -> bytes:
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(steps.itemsize)
        file.setframerate(RATE)
        file.writeframes(steps.tobytes())
    return written.getvalue()


def picture(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=numpy.uint8))


def as_address(picture: Any) -> str:
    """For requests, with the picture in it."""
    written = io.BytesIO()
    picture.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def tokenizer(size: int) -> Any:
    """One token per letter; the vocabulary is filled up to `size` with words that no text has."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *LETTERS]
    words += [f"<word {place}>" for place in range(size - len(words))]
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    named = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, extra_special_tokens=["<image>"])


def _random(model: Any, seed: int) -> Any:
    from tiny_models import randomize

    randomize(model, seed=seed)
    return model.eval().float()


def reranker(folder: Path, *, seed: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    BertTokenizer(vocab={word: place for place, word in enumerate(words)}).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        num_labels=1,
        attn_implementation="eager",
    )
    model = _random(BertForSequenceClassification(config), seed)
    model.save_pretrained(folder)
    return model


def whisper(folder: Path, *, seed: int) -> Any:
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    words = [f"Ġ{place}" for place in range(WORDS)] + SPOKEN_FIRST + ["<|endoftext|>"]  # as BPE writes a space
    extractor = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=SECONDS)
    tokens = WhisperTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[])
    tokens.add_tokens(SPOKEN_FIRST, special_tokens=True)
    WhisperProcessor(extractor, tokens).save_pretrained(folder)
    config = WhisperConfig(
        vocab_size=512,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=SECONDS * 50,
        max_target_positions=64,
        pad_token_id=511,
        bos_token_id=511,
        eos_token_id=511,
        decoder_start_token_id=FIRST[0],
        suppress_tokens=[],
        begin_suppress_tokens=[],
        attn_implementation="eager",
    )
    model = _random(WhisperForConditionalGeneration(config), seed)
    # Tied to what is read off at the end: small, or the model only repeats its last token.
    model.model.decoder.embed_tokens.weight.data.mul_(0.2)
    model.model.decoder.embed_positions.weight.data.mul_(0.5)
    model.generation_config.forced_decoder_ids = None
    model.save_pretrained(folder)
    return model, extractor


def blip2(folder: Path, *, seed: int) -> Any:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = Blip2Processor(images, tokenizer(128), num_query_tokens=4)
    processor.save_pretrained(folder)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**shape, image_size=SIDE, patch_size=14).to_dict(),
        qformer_config=Blip2QFormerConfig(**shape, vocab_size=128, encoder_hidden_size=64).to_dict(),
        text_config=OPTConfig(
            vocab_size=128,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        ).to_dict(),
        num_query_tokens=4,
        image_token_index=SPECIAL.index("<image>"),
    )
    model = _random(Blip2ForConditionalGeneration(config), seed)
    model.save_pretrained(folder)
    return model, processor
