"""Token stores in memory, and small tokenizers, for the tests of this folder."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from aliquot.data.batches import Batches
from aliquot.data.data_order import TrainStore
from aliquot.data.micro_batch_rows import SequenceFormat
from aliquot.data.text_encoder import EncoderSpec, encode_records
from aliquot.data.token_store import TokenStore

TEXT = "The quick brown fox jumps over the lazy dog.\nIt didn't stop; it's 12345 now:\n\n  def f(x):\n\treturn x\n"


def memory_store(documents: list[list[int]], masks: list[list[int]] | None = None) -> TokenStore:
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    tokens = np.array([token for document in documents for token in document], np.uint16)
    mask = None if masks is None else np.array([bit for row in masks for bit in row], np.uint8)
    return TokenStore(Path("memory"), tokens, offsets, mask)


def numbered(lengths: list[int]) -> TokenStore:
    """Documents whose tokens are all different, so that a token says where it is from."""
    ids = iter(range(1, sum(lengths) + 1))
    return memory_store([[next(ids) for _ in range(length)] for length in lengths])


def byte_level(bos: bool = True, eos: str | None = "</s>", vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `bos`: it puts <s> in front of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>"] + ([eos] if eos else [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)


def encode_record(tokenizer: Any, text: str, spec: EncoderSpec) -> tuple[list[int], list[int], dict[str, str]]:
    """Return (token ids, mask, notes) of one record."""
    [([(ids, mask)], notes)] = encode_records(tokenizer, [text], spec)
    return ids, mask, notes


def gemma_like() -> PreTrainedTokenizerFast:
    """As `sentencepiece_like`, but nothing is put in front of a text, and newlines have tokens."""
    from tokenizers import normalizers

    spec = json.loads(sentencepiece_like().backend_tokenizer.to_str())
    vocabulary, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for token in ("\n", "\n\n", "。"):
        vocabulary[token] = len(vocabulary)
    merges.append(["\n", "\n"])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """BPE over whole texts with byte fallback, as Llama 2's."""
    from tokenizers import normalizers

    tokenizer = Tokenizer(models.BPE())
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.train_from_iterator(TEXT.split(), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    trained = Tokenizer.from_str(tokenizer.to_str())
    vocabulary = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary += [token for token in trained.get_vocab() if token not in vocabulary]
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    model = models.BPE(
        {token: index for index, token in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True
    )
    whole = Tokenizer(model)
    whole.normalizer = tokenizer.normalizer
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_batches(
    sources: Sequence[TrainStore], *, sequence_length: int, packing: bool, pad_id: int, **settings: Any
) -> Batches:
    format = SequenceFormat(
        sequence_length, pad_id, packing, settings.pop("packs", True), settings.pop("fills_up", False)
    )
    return Batches(sources, format, **settings)


def damage_every_file(cache: Path, seed: int = 0) -> list[Path]:
    """Damage each file of a cache, and return the files."""
    draw = random.Random(seed)
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size)
    for file in files:
        damage(file, draw)
    return files


def damage(file: Path, draw: random.Random) -> str:
    """Change a random byte of a file, or cut off the last one; return what was done."""
    data = file.read_bytes() or b"x"
    place = draw.choice((draw.randrange(len(data)), draw.randrange(len(data)), len(data) - 1))
    flipped, other = data[place] ^ 1 << draw.randrange(8), data[place] + draw.randrange(1, 256) & 255
    new = draw.choice((bytes([flipped]), bytes([other]), b"" if place == len(data) - 1 else bytes([other])))
    file.write_bytes(data[:place] + new + data[place + 1 :])
    return f"{data[place]} at byte {place} became {list(new)}"
