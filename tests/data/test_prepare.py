"""From a config section to token stores on disk: in parallel like alone, once and never twice, whole or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from aliquot.config.schema import DataSection
from aliquot.core.errors import TrainingError, UserError
from aliquot.core.small_files import cache_root
from aliquot.data import tokenize
from aliquot.data.cache import publishing
from aliquot.data.chat import AS_TEXT, AS_TOKENS
from aliquot.data.cuts import pieces
from aliquot.data.documents import UNKNOWN_ROLE
from aliquot.data.encoder import HOLDS_SPECIAL, Encoded, Encoder, EncoderProcess, Texts
from aliquot.data.prepare import Prepared, prepare
from aliquot.data.text_encoder import EncoderSpec
from aliquot.data.token_store import TokenStore, token_dtype
from aliquot.data.tokenizer import convention_of
from aliquot.machine.cpu import read_cpu
from tests.data.stores import TEXT, byte_level, damage_every_file
from tests.data.test_chat import CHATML, STRICT, TALK


@pytest.fixture
def model(tmp_path: Path) -> Path:
    byte_level().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    for n in range(5):
        (tmp_path / "corpus" / f"{n}.txt").write_text(f"{n}\n\n" + TEXT * (40 if n == 3 else 2) + "é語</s>")
    return tmp_path / "corpus"


def section(corpus: Path, **settings: object) -> DataSection:
    return DataSection(path=str(corpus), **{"cache_directory": corpus.parent / "cache", **settings})


def rows(store: TokenStore) -> list[list[int]]:
    return [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]


def forbid_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("aliquot.data.prepare.tokenize", must_not)


def test_documents_have_bos_eos_and_whole_file_tokens(corpus: Path, model: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    prepared = prepare(section(corpus), model, 300, lambda _, done, total: calls.append((done, total)))
    tokenizer = prepared.load_tokenizer()
    texts = [(corpus / f"{n}.txt").read_text() for n in range(5)]
    assert rows(prepared.open_train()[""]) == [
        [0, *tokenizer.encode(text, add_special_tokens=False), 1] for text in texts
    ]
    assert prepared.open_train()[""].tokens.dtype == np.uint16
    assert prepared.open_train()[""].mask is None
    assert prepared.open_eval() == {}
    assert prepared.pad_id == 1
    assert calls[-1] == (sum(len(text.encode()) for text in texts),) * 2
    assert Prepared.from_json(prepared.to_json()) == prepared
    bare = prepare(section(corpus, add_bos=False, add_eos=False), model, 300).open_train()[""]
    assert rows(bare) == [row[1:-1] for row in rows(prepared.open_train()[""])]


def test_predicted_text_bytes(corpus: Path, model: Path) -> None:
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    (corpus / "5.txt").write_text("語 is the first word here")  # its first token is one of the three bytes of 語
    whole = sum(len(text.encode()) for text in [*texts, "語 is the first word here"])
    assert prepare(section(corpus), model, 300).open_train()[""].text_bytes == whole
    bare = prepare(section(corpus, add_bos=False), model, 300)
    firsts = [bare.load_tokenizer().decode(row[:1]) for row in rows(bare.open_train()[""])]
    assert firsts[:5] == ["0", "1", "2", "3", "4"]
    assert bare.open_train()[""].text_bytes == whole - 5 - len("語".encode())


@pytest.mark.long
def test_wikitext_with_a_llama_tokenizer(shared: Path, tmp_path: Path) -> None:
    model = shared / "models" / "stories15M"
    for name in ("wikitext2-raw-valid.parquet", "wikitext2-raw-valid.txt"):
        unit = "line" if name.endswith("txt") else None
        config = DataSection(path=str(shared / "data" / name), document=unit, cache_directory=tmp_path)
        store = prepare(config, model, 32000).open_train()[""]
        assert (store.tokens[store.offsets[:-1]] == 1).all()
        assert (store.tokens[store.offsets[1:] - 1] == 2).all()
        assert (store.tokens == 1).sum() == (store.tokens == 2).sum() == store.documents == 2461
    with pytest.raises(UserError, match=r"tokenizer has 32000 tokens .* only 512 rows"):
        prepare(config, model, 512)


def test_two_processes_equal_one(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = prepare(section(corpus), model, 300).open_train()[""]
    calls: list[int] = []
    monkeypatch.setattr(tokenize, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(tokenize, "pieces", partial(pieces, characters=200))
    monkeypatch.setattr("aliquot.data.documents.PART_BYTES", 150)  # a file comes in parts, too
    parallel = prepare(
        section(corpus, num_proc=2, cache_directory=corpus.parent / "other"),
        model,
        300,
        lambda *done: calls.append(done[0]),
    ).open_train()[""]
    assert rows(parallel) == rows(alone)
    assert parallel.text_bytes == alone.text_bytes is not None
    assert len(calls) > 10
    assert calls == sorted(calls)
    assert parallel.path.name == alone.path.name


def test_a_second_start_tokenises_nothing(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = section(corpus, tokenizer_vocab_size=280, eval_fraction=0.3)
    first = prepare(config, None, 300)
    forbid_tokenising(monkeypatch)
    calls: list[object] = []
    assert prepare(config, None, 300, lambda *done: calls.append(done)) == first
    assert calls == []
    moved = corpus.rename(corpus.parent / "moved")
    assert prepare(config.model_copy(update={"path": str(moved)}), None, 300) == first


@pytest.mark.parametrize("change", ["content", "name order", "tokenizer", "bos", "document", "held out"])
def test_whatever_the_tokens_depend_on_makes_them_anew(corpus: Path, model: Path, change: str) -> None:
    before = prepare(section(corpus), model, 300)
    settings: dict[str, object] = {}
    if change == "content":
        (corpus / "0.txt").write_text("0\n\n" + TEXT * 2 + "É語</s>")
    elif change == "name order":
        (corpus / "0.txt").rename(corpus / "9.txt")
    elif change == "tokenizer":
        byte_level(vocabulary=290).save_pretrained(model)
    else:
        settings = {"bos": {"add_bos": False}, "document": {"document": "line"}, "held out": {"eval_fraction": 0.4}}[
            change
        ]
    after = prepare(section(corpus, **settings), model, 300)
    assert after.train != before.train
    assert rows(after.open_train()[""]) != rows(before.open_train()[""])


def test_evaluation_from_a_part_or_a_path(corpus: Path, model: Path) -> None:
    whole = sorted(rows(prepare(section(corpus), model, 300).open_train()[""]))
    parted = prepare(section(corpus, eval_fraction=0.4), model, 300)
    held = parted.open_eval()[""]
    assert held is not None
    assert sorted(rows(parted.open_train()[""]) + rows(held)) == whole
    elsewhere = section(corpus, eval_fraction=0.4, cache_directory=corpus.parent / "another cache")
    evaluated = prepare(elsewhere, model, 300, trains=False)
    assert evaluated.train == evaluated.eval and Path(evaluated.eval[""]).name == Path(parted.eval[""]).name
    assert len(list((corpus.parent / "another cache" / "tokens").iterdir())) == 1
    given = prepare(section(corpus, eval_fraction=0.4, eval_path=str(corpus / "1.txt")), model, 300).open_eval()[""]
    assert given is not None
    assert given.documents == 1


def test_uncuttable_line_has_bounded_memory(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genome = "".join(random.Random(0).choices("acgt", k=2500))
    (tmp_path / "genome.txt").write_text(genome)
    longest: list[int] = []
    encode = Encoder.encode

    def watched(self: Encoder, batch: Texts) -> Encoded:
        longest.append(max(map(len, batch.texts)))
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "encode", watched)
    monkeypatch.setattr(tokenize, "pieces", partial(pieces, characters=100, longest=1000))
    # Encoded in this process, which can be watched.
    monkeypatch.setattr(tokenize.EncoderPool, "_encode_in_workers", tokenize.EncoderPool._encode_here)
    store = prepare(section(tmp_path / "genome.txt"), model, 300).open_train()[""]
    assert store.documents == 1 and max(longest) == 1000
    assert store.left_out == {tokenize.INEXACT_CUT: 2}
    assert byte_level().decode(rows(store)[0], skip_special_tokens=True) == genome


def test_a_tokenizer_without_a_fast_backend_works(corpus: Path) -> None:
    slow = ByT5Tokenizer()
    slow.save_pretrained(corpus.parent / "slow")
    store = prepare(section(corpus), corpus.parent / "slow", 384).open_train()[""]
    text = (corpus / "0.txt").read_text()
    assert rows(store)[0] == [*slow.encode(text, add_special_tokens=False), slow.eos_token_id]
    assert store.text_bytes is None  # it does not say what its first token stands for


def test_a_truncating_tokenizer_json_truncates_nothing(corpus: Path, model: Path) -> None:
    spec = json.loads((model / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (model / "tokenizer.json").write_text(json.dumps(spec))
    store = prepare(section(corpus, tokenizer=str(model / "tokenizer.json")), None, 300).open_train()[""]
    assert np.diff(store.offsets).min() > 50


def test_special_tokens_in_texts_are_counted_and_may_be_letters(corpus: Path, model: Path) -> None:
    """Of plain texts; by default under the key of the cache that they have had."""
    eos = byte_level().eos_token_id
    tokens = prepare(section(corpus, add_eos=False), model, 300).open_train()[""]
    assert np.count_nonzero(tokens.tokens == eos) == tokens.left_out[HOLDS_SPECIAL] == 5
    letters = prepare(section(corpus, add_eos=False, special_tokens_in_text="text"), model, 300).open_train()[""]
    assert np.count_nonzero(letters.tokens == eos) == 0 and not letters.left_out
    assert byte_level().decode(rows(letters)[0]) == byte_level().decode(rows(tokens)[0])
    assert letters.path != tokens.path
    named = prepare(section(corpus, add_eos=False, special_tokens_in_text="encode"), model, 300)
    assert named.train[""] == str(tokens.path)


def test_special_tokens_in_chat_text_are_letters(tmp_path: Path, model: Path) -> None:
    talk = [{"role": "user", "content": "fox?</s>"}, TALK[1]]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": talk}))
    chats = section(tmp_path / "c.jsonl", chat_template=CHATML)
    counts = {}
    for key in (None, "text", "encode"):
        store = prepare(chats.model_copy(update={"special_tokens_in_text": key}), model, 300).open_train()[""]
        counts[key] = (rows(store)[0].count(1), store.firsts)
    place = f"{tmp_path / 'c.jsonl'}:1: '</s>'"
    assert counts[None] == counts["text"] == (2, {AS_TEXT: place})
    assert counts["encode"] == (3, {AS_TOKENS: place})


def test_date_of_the_template_is_part_of_the_tokens(tmp_path: Path, model: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK}))
    dated = section(tmp_path / "c.jsonl", chat_template="{{ strftime_now('%d %b %Y') }}" + CHATML)
    days = [date(2024, 2, 3), date(2024, 2, 4)]
    first, other = (prepare(dated.model_copy(update={"chat_template_date": day}), model, 300) for day in days)
    assert (first.day, other.day) == ("2024-02-03", "2024-02-04")
    assert first.train != other.train
    assert byte_level().decode(rows(first.open_train()[""])[0]).startswith("03 Feb 2024<|user|>")
    assert prepare(dated, model, 300).day == str(date.today())
    plain = section(tmp_path / "c.jsonl", chat_template=CHATML)
    same = [prepare(plain.model_copy(update={"chat_template_date": day}), model, 300) for day in days]
    assert same[0] == same[1] and same[0].day is None


# Two processes each import transformers.
@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.long)])
def test_conversations(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, num_proc: int) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    talks = [TALK, TALK[:1], TALK[2:]]  # the second has nothing that the assistant says
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    if num_proc == 2:
        monkeypatch.setattr(tokenize, "CHUNK_TEXTS", 1)
    config = section(tmp_path / "c.jsonl", text_field="messages", num_proc=num_proc)
    store = prepare(config, model, 300).open_train()[""]
    assert [tokenizer.decode(row) for row in rows(store)] == [
        tokenizer.apply_chat_template(talk, tokenize=False) for talk in (TALK, TALK[2:])
    ]
    assert store.mask is not None and store.text_bytes is None
    assert tokenizer.decode(store.tokens[store.mask == 1]) == "dog é 12345</s>\nstop</s>\nstop</s>\n"
    prepared = prepare(config, model, 300)
    assert (prepared.prefix, prepared.chat_prefix) == (convention_of(tokenizer, None, None).prefix, ())
    dressed = rows(prepare(config.model_copy(update={"add_bos": True, "add_eos": True}), model, 300).open_train()[""])
    assert dressed == [[0, *row, 1] for row in rows(store)]


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({"a.txt": " \n\n"}, {}, r"data.path .*: no usable document: 1 x a blank record, left out"),
        ({"a.txt": "", "b.jsonl": ""}, {}, r"data.path .*: no usable document: there are 0 bytes. Check the path"),
        ({"a.csv": ""}, {}, r"data.path .*: no usable document: there are 0 bytes. Check the path"),
        (
            {"a.txt": "x"},
            {"add_bos": False, "add_eos": False},
            "no usable document: 1 document without a token to learn",
        ),
        (
            {"a.txt": "x y z"},
            {"eval_fraction": 0.5},
            r"data.eval_fraction 0.5\): no document is (left to train on|held out): set data.eval_path instead. A text",
        ),
        (
            {"a.txt": "a\nb\nc\nd\ne\nf\n"},
            {"eval_fraction": 0.01, "document": "line"},
            r"data.eval_fraction 0.01\): no document is held out: set data.eval_fraction: 0.\d+. A text",
        ),
        ({"a.jsonl": '{"text": [{"role": "user", "content": "a"}]}\n'}, {}, "the tokenizer has no chat template"),
        (
            {"a.jsonl": '{"text": "a"}\n{"text": [{"role": "user", "content": "a"}]}\n'},
            {},
            "some documents are text",
        ),
        ({"a.txt": "x y"}, {"tokenizer_vocab_size": 301}, "tokenizer_vocab_size is 301, .* only 300 rows"),
        ({"a.txt": "x y"}, {"tokenizer": "./absent"}, "absent: no such tokenizer file or directory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(
    tmp_path: Path, model: Path, files: dict[str, str], settings: dict[str, object], message: str
) -> None:
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        prepare(section(tmp_path / "data", **settings), model, 300)
    assert "\n" not in str(caught.value)
    tokens = tmp_path / "cache" / "tokens"
    assert not tokens.exists() or all((store / "store.json").exists() for store in tokens.iterdir())


def test_export_prefix_applies_to_its_own_tokenizer(corpus: Path, model: Path) -> None:
    (model / "aliquot.json").write_text('{"prefix": [7]}')
    assert prepare(section(corpus), model, 300).prefix == (7,)
    other = shutil.copytree(model, model.parent / "other", ignore=shutil.ignore_patterns("aliquot.json"))
    own = convention_of(byte_level(), None, None).prefix
    assert prepare(section(corpus, tokenizer=str(other)), model, 300).prefix == own != (7,)


def test_a_model_from_scratch_needs_a_tokenizer(corpus: Path) -> None:
    with pytest.raises(
        UserError, match=r"from scratch has no tokenizer: set data.tokenizer or data.tokenizer_vocab_size"
    ):
        prepare(section(corpus), None, 300)


def test_unusable_cache(corpus: Path, model: Path) -> None:
    (corpus.parent / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the data cache"):
        prepare(section(corpus, cache_directory=corpus.parent / "file"), model, 300)


def test_damaged_cache_is_made_again(corpus: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = section(corpus)

    def contents() -> tuple[list[object], bytes]:
        prepared = prepare(settings, model, 300)
        store = prepared.open_train()[""]
        return [store.tokens.tolist(), store.offsets.tolist()], Path(prepared.tokenizer, "tokenizer.json").read_bytes()

    before = contents()
    assert settings.cache_directory is not None
    for seed in range(3):
        assert {file.name for file in damage_every_file(settings.cache_directory, seed)} > {"tokens.bin", "store.json"}
        caplog.clear()
        assert contents() == before
        assert len([text for text in caplog.messages if text.endswith("it is made again")]) == 2
    prepared = prepare(settings, model, 300)
    Path(prepared.train[""], "store.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match=r"damaged since the start of this run .*: start again, and it is made again"):
        prepared.open_train()


def test_cache_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path))
    assert cache_root(None) == tmp_path
    assert cache_root(tmp_path / "x") == tmp_path / "x"
    monkeypatch.delenv("ALIQUOT_CACHE")
    assert cache_root(None) == Path("~/.cache/aliquot").expanduser()


def test_the_width_of_a_token() -> None:
    assert (token_dtype(65535), token_dtype(65536)) == (np.uint16, np.uint32)


def test_dead_worker_is_reported_and_orphan_ends(model: Path) -> None:
    spec = EncoderSpec(str(model), fast=True, prefix=(), suffix=())
    batch = Texts(["fox"], np.array([True]), np.array([True]))
    worker = EncoderProcess(spec)
    worker.send(batch)
    assert worker.receive().ids.tolist() == byte_level().encode("fox", add_special_tokens=False)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"a tokenising process ended \(exit code -9\)"):
        worker.send(batch)
        worker.receive()
    orphan = EncoderProcess(spec)
    orphan.connection.close()
    assert orphan.process.wait(timeout=60) == 0


def test_encoding_needs_neither_torch_nor_transformers() -> None:
    modules = "aliquot.data.encoder, aliquot.data.tokenize, aliquot.data.sources, aliquot.data.packing"
    code = f"import sys, {modules}; assert not {{'torch', 'transformers', 'datasets'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_changed_encoding_reencodes_chats_only(
    tmp_path: Path, corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    chats = section(tmp_path / "c.jsonl", chat_template=CHATML)
    before, text = prepare(chats, model, 300).train, prepare(section(corpus), model, 300).train
    assert prepare(chats, model, 300).train == before
    monkeypatch.setattr("aliquot.data.prepare.ENCODING", 0)
    assert prepare(chats, model, 300).train != before
    forbid_tokenising(monkeypatch)
    assert prepare(section(corpus), model, 300).train == text


@pytest.mark.parametrize("records", [3, pytest.param(9000, marks=pytest.mark.long)])
def test_unrenderable_chats_are_counted_and_named(tmp_path: Path, model: Path, records: int) -> None:
    lines = [json.dumps({"messages": TALK[:2]})] * (records - 1) + [json.dumps({"messages": TALK[1:]})]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    chats = section(tmp_path / "c.jsonl", chat_template=STRICT, num_proc=1)
    store = prepare(chats, model, 300).open_train()[""]
    (reason,) = store.left_out
    assert (store.documents, store.left_out[reason]) == (records - 1, 1)
    assert store.firsts[reason] == f"{tmp_path / 'c.jsonl'}:{records}: the user begins"
    (tmp_path / "c.jsonl").write_text(lines[-1])
    with pytest.raises(UserError, match=r"no usable document: .*1 x .*fails on.*c\.jsonl:1: the user begins"):
        prepare(chats, model, 300)


def test_bad_records_are_counted_by_reason(tmp_path: Path, model: Path) -> None:
    strange = {"messages": [{"role": "narrator", "content": "x"}]}
    lines = [json.dumps(record) for record in ({"messages": TALK}, strange, strange)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    store = prepare(section(tmp_path / "c.jsonl", chat_template=CHATML), model, 300).open_train()[""]
    assert (store.documents, store.left_out) == (1, {UNKNOWN_ROLE: 2})
    assert store.firsts[UNKNOWN_ROLE].startswith(f"{tmp_path / 'c.jsonl'}:2: a message's role is 'narrator'; known are")


def test_vocabulary_with_holes_keeps_tokens_whole(tmp_path: Path, corpus: Path) -> None:
    tokenizer = byte_level()
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = told["model"]["vocab"]
    token = tokenizer.convert_ids_to_tokens(tokenizer.encode(TEXT)[3])
    vocabulary[token] = 70_000  # far above their number
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    store = prepare(section(corpus), tmp_path / "tokenizer.json", 70_001).open_train()[""]
    assert store.tokens.max() == 70_000


def test_long_tokenisation_is_not_removed(tmp_path: Path) -> None:
    with publishing(tmp_path / "slow") as beside:
        (beside / "tokens.bin").write_bytes(b"")
        os.utime(beside, (0, 0))
        with publishing(tmp_path / "quick"):
            pass
        assert beside.is_dir()
        os.utime(beside / "tokens.bin", (0, 0))
        with publishing(tmp_path / "other"):
            pass
        assert not beside.exists()
        beside.mkdir()


def test_encoders_fit_cores_and_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and 2 GiB of a machine of 96: one encoder a core of the machine would be too much memory."""
    cpu = read_cpu()
    for quota, gib, encoders in ((2.0, 2, 2), (96.0, 1, 4), (0.5, 64, 1), (96.0, 0.1, 1)):
        machine = replace(cpu, cores=tuple((core,) for core in range(96)), quota=quota)
        monkeypatch.setattr(tokenize, "read_cpu", lambda machine=machine: machine)
        monkeypatch.setattr(tokenize, "memory_limit", lambda gib=gib: int(gib * 2**30))
        assert tokenize._cores() == encoders
