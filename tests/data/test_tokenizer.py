"""Loading and training tokenizers, and the convention that their model follows."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from aliquot.config.schema import DataSection
from aliquot.core.errors import MissingToolError, UserError
from aliquot.data.prepare import prepare
from aliquot.data.sources import source_of
from aliquot.data.tokenizer import convention_of, load_tokenizer, publish_tokenizer, trained_tokenizer
from aliquot.data.vocabulary import check_vocabulary
from tests.data.stores import TEXT, byte_level


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", ["</s>", None])
def test_convention_follows_the_tokenizer(bos: bool, eos: str | None) -> None:
    tokenizer = byte_level(bos, eos)
    default = convention_of(tokenizer, None, None)
    assert default.prefix == ((0,) if bos else ())
    assert default.suffix == ((1,) if eos else ())
    assert default.pad_id == (1 if eos else 0)
    assert convention_of(tokenizer, True, False).prefix == (0,)
    assert convention_of(tokenizer, True, False).suffix == ()
    assert convention_of(tokenizer, False, None).prefix == ()
    if eos is None:
        with pytest.raises(UserError, match=r"data.add_eos is true, but the tokenizer has no eos token"):
            convention_of(tokenizer, None, True)
    tokenizer.pad_token = "q"
    assert convention_of(tokenizer, None, None).pad_id == tokenizer.convert_tokens_to_ids("q")


def test_missing_bos_cannot_be_added() -> None:
    tokenizer = byte_level(bos=False)
    tokenizer.bos_token = None
    assert convention_of(tokenizer, None, None).prefix == ()
    with pytest.raises(UserError, match=r"data.add_bos is true, but the tokenizer has no bos token"):
        convention_of(tokenizer, True, None)


def test_eos_of_the_tokenizer_is_added_once() -> None:
    convention = convention_of(ByT5Tokenizer(), None, None)  # adds </s>, has no bos, and no fast backend
    assert convention.prefix == ()
    assert convention.suffix == (1,)
    assert convention.pad_id == 0


@pytest.mark.parametrize(("path", "bos", "eos"), [("models/stories15M", 1, 2), ("tokenizers/llama3", 128000, 128001)])
def test_llama_conventions(shared: Path, path: str, bos: int, eos: int) -> None:
    convention = convention_of(load_tokenizer(shared / path), None, None)
    assert (convention.prefix, convention.suffix, convention.pad_id) == ((bos,), (eos,), eos)


def test_tokenizer_loads_from_directory_and_files(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "full")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes((tmp_path / "full" / "tokenizer.json").read_bytes())
    for path in ("full", "full/tokenizer.json", "bare/tokenizer.json"):
        assert load_tokenizer(tmp_path / path).encode("fox") == byte_level().encode("fox")
    assert load_tokenizer(tmp_path / "full" / "tokenizer.json").eos_token == "</s>"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    for path in ("bad", "bad/tokenizer.json"):
        with pytest.raises(UserError, match="cannot load a tokenizer") as caught:
            load_tokenizer(tmp_path / path)
        assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen2"}')  # transformers makes one without words
    with pytest.raises(UserError, match=r"no tokenizer here: set data\.tokenizer"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no vocabulary, such as tokenizer\.json: .* set data\.tokenizer"):
        load_tokenizer(tmp_path / "empty")
    for path in (str(tmp_path / "absent"), "./absent", "a/b/c"):
        with pytest.raises(UserError, match="no such tokenizer file or directory"):
            load_tokenizer(path)


def test_bare_sentencepiece_model_names_its_package(tmp_path: Path, shared: Path) -> None:
    if importlib.util.find_spec("sentencepiece") is not None:
        pytest.skip("sentencepiece is installed: it reads the file")
    shutil.copy(shared / "models" / "stories260K" / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(MissingToolError, match=r"is a sentencepiece model .*: pip install sentencepiece$"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_must_fit_the_embedding() -> None:
    tokenizer = byte_level()
    check_vocabulary(tokenizer, len(tokenizer))
    with pytest.raises(
        UserError, match=f"tokenizer has {len(tokenizer)} tokens .* embedding only {len(tokenizer) - 1}"
    ):
        check_vocabulary(tokenizer, len(tokenizer) - 1)


def test_unused_tokens_may_lack_a_row(tmp_path: Path) -> None:
    tokenizer = byte_level()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    assert not check_vocabulary(tokenizer, rows, is_models_own=True) and check_vocabulary(
        tokenizer, rows + 1, is_models_own=True
    )
    with pytest.raises(UserError, match=f"tokenizer has {rows + 1} tokens"):
        check_vocabulary(tokenizer, rows)
    with pytest.raises(UserError, match=f"tokenizer has {rows + 1} tokens"):
        check_vocabulary(tokenizer, rows - 1, is_models_own=True)
    model, text = tmp_path / "model", tmp_path / "a.txt"
    tokenizer.pad_token = "<image>"
    tokenizer.save_pretrained(model)
    section = DataSection(path=str(text), cache_directory=tmp_path / "cache", num_proc=1)
    text.write_text("nothing to see")
    assert prepare(section, model, rows).pad_id == 0
    text.write_text("this is <image> here")
    with pytest.raises(UserError, match=f"documents hold '<image>', which the tokenizer has as token {rows}"):
        prepare(section, model, rows)


def test_several_chat_templates_share_a_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    again = load_tokenizer(publish_tokenizer(tokenizer, tmp_path))
    assert again.chat_template == tokenizer.chat_template


def test_tokenizer_hash_ignores_its_origin(tmp_path: Path) -> None:
    """transformers writes among its settings whether a hub might have been asked: HF_HUB_OFFLINE would make others."""
    names = set()
    for told in (True, False):
        tokenizer = byte_level()
        tokenizer.init_kwargs |= {"local_files_only": told, "is_local": told}
        names.add(publish_tokenizer(tokenizer, tmp_path / str(told)).name)
    assert len(names) == 1


def test_newline_with_indentation_is_a_token(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def f(self):\n        return self\n\n" * 50)
    tokenizer = trained_tokenizer([source_of(DataSection(path=str(tmp_path / "a.py")), tmp_path)], 300, tmp_path)
    ids = tokenizer.encode("x:\n        return", add_special_tokens=False)
    assert [tokenizer.decode([token]) for token in ids] == ["x", ":", "\n       ", " return"]


def test_trained_tokenizer_is_reproducible_and_cached(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 50 + "é語🙂")
    source = [source_of(DataSection(path=str(tmp_path / "a.txt"), document="line"), tmp_path)]
    calls: list[int] = []
    first = trained_tokenizer(source, 320, tmp_path / "one", lambda done, total: calls.append(done))
    assert calls
    calls.clear()
    again = trained_tokenizer(source, 320, tmp_path / "one", lambda done, total: calls.append(done))
    assert not calls
    other = trained_tokenizer(source, 320, tmp_path / "two")
    assert len(first) == 320
    assert first.get_vocab() == again.get_vocab() == other.get_vocab()
    assert publish_tokenizer(first, tmp_path / "one").name == publish_tokenizer(other, tmp_path / "two").name
    assert len(trained_tokenizer(source, 300, tmp_path / "one")) == 300
    for text in (TEXT, "é語🙂 \x00 never seen"):
        ids = first.encode(text)
        assert ids[0] == first.bos_token_id
        assert first.decode(ids[1:]) == text
    assert convention_of(first, None, None).suffix == (first.eos_token_id,)
    with pytest.raises(UserError, match=r"data.tokenizer_vocab_size is 257; every byte, bos and eos need 258"):
        prepare(DataSection(path=str(tmp_path / "a.txt"), tokenizer_vocab_size=257), None, 300)
