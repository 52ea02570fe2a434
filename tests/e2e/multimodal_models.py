"""Makes tiny models with other inputs than one text (a reranker, Whisper, BLIP-2), and inputs for them.

The inputs are pairs of texts, sounds, and pictures with a text. Processors and tokenizers are made here too, with a
vocabulary of a few letters, so that nothing is downloaded.
"""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy

RATE = 16000
"""Samples of sound per second."""
SECONDS = 2
"""Seconds of sound that Whisper's encoder takes."""
SIDE = 28
"""Width and height of a picture in pixels."""
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz .,?!")
DECODER_PROMPT = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
"""The decoder prompt that vLLM gives Whisper for a request in English."""
WORDS = 512 - len(DECODER_PROMPT) - 1
"""Number of plain words in Whisper's vocabulary. Word n is token n, and the special tokens follow."""
FIRST = list(range(WORDS, WORDS + len(DECODER_PROMPT)))
"""The tokens of DECODER_PROMPT."""


def sound(seed: int) -> numpy.ndarray:
    """Returns a sound of two tones and noise, shorter than what Whisper's encoder takes."""
    random = numpy.random.default_rng(seed)
    time = numpy.arange(RATE * SECONDS * 3 // 4) / RATE
    tones = sum(numpy.sin(2 * numpy.pi * pitch * time) for pitch in random.uniform(100, 3000, 2))
    return (0.2 * tones + 0.05 * random.standard_normal(time.shape)).astype(numpy.float32)


def sound_int16(seed: int) -> numpy.ndarray:
    """Returns the sound of `sound` in 16-bit samples, as a file has them."""
    return (sound(seed) * 32768).round().astype(numpy.int16)


def as_wav(samples: numpy.ndarray) -> bytes:
    """Returns a WAV file with these samples."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(samples.itemsize)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return written.getvalue()


def picture(seed: int) -> Any:
    """Returns a picture of random pixels."""
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=numpy.uint8))


def as_data_url(picture: Any) -> str:
    """Returns a data URL that contains the picture as PNG."""
    written = io.BytesIO()
    picture.save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def tokenizer(size: int) -> Any:
    """Returns a tokenizer with one token per letter; the vocabulary is filled up to `size` with unused words."""
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
    """Saves a BERT reranker with its tokenizer, and returns the model."""
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
    """Saves a Whisper model with its processor; returns the model and the feature extractor."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    words = [f"Ġ{place}" for place in range(WORDS)] + DECODER_PROMPT + ["<|endoftext|>"]  # as BPE writes a space
    extractor = WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=SECONDS)
    tokens = WhisperTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[])
    tokens.add_tokens(DECODER_PROMPT, special_tokens=True)
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
    # The embeddings are tied to the output head: they must be small, or the model only repeats its last token.
    model.model.decoder.embed_tokens.weight.data.mul_(0.2)
    model.model.decoder.embed_positions.weight.data.mul_(0.5)
    model.generation_config.forced_decoder_ids = None
    model.save_pretrained(folder)
    return model, extractor


def blip2(folder: Path, *, seed: int) -> Any:
    """Saves a BLIP-2 model with its processor, and returns both."""
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
