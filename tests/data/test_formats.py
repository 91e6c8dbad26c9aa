"""Records of the usual formats, found by their fields: what is an answer, and what cannot be one."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aliquot.config.data_section import DataSection
from aliquot.core.errors import UserError
from aliquot.data.chat_messages import UNREADABLE_CALL, is_learned
from aliquot.data.documents import MISSING_FIELD, UNCLEAR_PROMPT, BadRecordError
from aliquot.data.encoder import prompt_hash
from aliquot.data.file_source import record_documents
from aliquot.data.formats import IMPLICIT_PROMPT, UNREAD, format_of, words
from aliquot.data.record_files import UNREAD_COLUMNS

PAIR = {"chosen": "chosen", "rejected": "rejected"}
RATED = {"prompt": "prompt", "completion": "completion", "label": "label"}  # what objective kto sets
ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
CHAT = {"messages": [ASKED, ANSWERED], "context": 0}


def read(record: dict[str, Any], **keys: Any) -> tuple[Any, str]:
    section = DataSection(path="x", **keys)
    document = format_of(section, record, "x:1").read(record, "x:1")
    return (json.loads(document.text) if document.text and document.kind != "text" else document.text), document.kind


@pytest.mark.parametrize(
    ("record", "document", "kind"),
    [
        ({"text": "hi", "id": 1}, "hi", "text"),
        ({"messages": [ASKED, ANSWERED], "text": "rendered"}, CHAT, "messages"),
        ({"messages": [ASKED, {"role": "gpt", "content": "yes"}]}, CHAT, "messages"),
        (
            {"messages": [{**ASKED, "at": datetime(2024, 5, 1)}, {**ANSWERED, "name": None, "tool_calls": []}]},
            {"messages": [{**ASKED, "at": "2024-05-01T00:00:00"}, {**ANSWERED, "name": None, "tool_calls": []}],
             "context": 0},
            "messages",
        ),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, CHAT, "conversations"),
        (
            {"system": "be kind", "conversations": [{"from": "human", "value": "hi"}]},
            {"messages": [{"role": "system", "content": "be kind"}, ASKED], "context": 0},
            "conversations",
        ),
        ({"prompt": "hi", "completion": "yes"}, {"prompt": "hi", "completion": "yes"}, "prompt"),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {**CHAT, "context": 1}, "prompt"),
        ({"prompt": [ASKED], "completion": "yes"}, {**CHAT, "context": 1}, "prompt"),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "text": "Below is"},
            {"instruction": "add", "input": "1 2", "output": "3"},
            "instruction",
        ),
        ({"instruction": "a", "context": "b", "response": "c"}, {"instruction": "a", "input": "b", "output": "c"},
         "instruction"),
        ({"instruction": "a", "output": "c"}, {"instruction": "a", "input": "", "output": "c"}, "instruction"),
        ({"question": "hi", "answer": "yes", "id": 1}, {"prompt": "hi", "completion": "yes"}, "prompt"),
        ({"question": "hi", "answer": "yes", "text": "t"}, "t", "text"),
        ({"prompt": json.dumps([ASKED]), "completion": json.dumps(ANSWERED)}, {**CHAT, "context": 1}, "prompt"),
        ({"prompt": "hi", "completion": '[{"from": 1}, 2]'}, {"prompt": "hi", "completion": '[{"from": 1}, 2]'},
         "prompt"),
        ({"messages": [ASKED, {**ANSWERED, "weight": "0"}]},
         {"messages": [ASKED, {**ANSWERED, "weight": False}], "context": 0}, "messages"),
        ({"messages": []}, "", "messages"),
        ({"messages": None}, "", "messages"),
        ({"prompt": " ", "completion": None}, "", "prompt"),
        ({"instruction": "", "input": " ", "output": ""}, "", "instruction"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
             "context": 0},
            "messages",
        ),
        (
            {"messages": [{"role": "system", "content": "short"}, ASKED], "system": [{"type": "text", "text": "kind"}]},
            {"messages": [{"role": "system", "content": [{"type": "text", "text": "kind"}]},
                          {"role": "system", "content": "short"}, ASKED], "context": 0},
            "messages",
        ),
    ],
)  # fmt: skip
def test_fields_determine_the_format(record: dict[str, Any], document: object, kind: str) -> None:
    assert read(record) == (document, kind)


def test_keys_name_other_fields() -> None:
    assert read({"q": "hi", "a": "yes"}, prompt="q", completion="a") == (
        {"prompt": "hi", "completion": "yes"},
        "prompt",
    )
    assert read({"talk": [ASKED, ANSWERED]}, messages="talk") == (CHAT, "messages")
    assert read({"prompt": "p", "completion": "c", "text": "t"}, text_field="text") == ("t", "text")


PART = {"begin_offset": 0, "end_offset": 0, "train": True}


@pytest.mark.parametrize(
    ("record", "keys", "message"),
    [
        ({"body": "x"}, {}, "x:1: no known field; there are body: set data.text_field"),
        ({"body": "x"}, {"text_field": "words"}, "x:1: no field 'words'; there are body: set data.text_field"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, {}, "x:1: a message's role is 'narrator'; known are"),
        ({"messages": ["hello"]}, {}, "x:1: field 'messages' is a list, but not one of messages"),
        ({"messages": "hello"}, {}, "x:1: field 'messages' holds str, not a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "a message's `content` must be text"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, {}, "x:1: a message's `weight` is 0.5: an answer is "),
        ({"messages": [ASKED, {**ANSWERED, "weight": "no"}]}, {}, "x:1: a message's `weight` is 'no': an answer is "),
        (
            {"qestion": "x", "answer": "y"},
            {"prompt": "question", "completion": "answer"},
            r"no field 'question'; there are qestion, answer \(did you mean 'qestion'\?\): set data.prompt and",
        ),
        (
            {"question": "x", "chosen": "a", "rejected": "b"},
            {"prompt": "qestion", **PAIR},
            r"no field 'qestion'; there are question, chosen, rejected \(did you mean 'question'\?\): set data.chosen",
        ),
        ({"body": "x"}, PAIR, "no field 'chosen'; there are body: set data.chosen, data.rejected and, for the prompt,"),
        ({"prompt": "x", "completion": "b"}, RATED, "no field 'label'; there are .*: set data.prompt, data.completion"),
        ({"ask": "x", "chosen": "The a", "rejected": "The b"}, PAIR, "without a prompt, but with text in 'ask': give"),
        ({"ask": "x", "chosen": [ANSWERED], "rejected": [NO]}, PAIR, "without a prompt, but with text in 'ask': give"),
        ({"system": "x", "chosen": "The a", "rejected": "The b"}, PAIR, "a pair without a prompt, .* 'system'"),
        ({"question": "x", "query": "y", "chosen": "a", "rejected": "b"}, PAIR, "'question' and 'query' may both hold"),
        (
            {"prompt": "[{'role': 'user', 'content': 'x'}]", "completion": "x"},
            {},
            "'prompt' holds text that is not JSON",
        ),
        ({"chosen": str([ASKED, ANSWERED]), "rejected": "x"}, PAIR, "field 'chosen' holds text that is not JSON"),
        ({"prompt": "x", "chosen": {"text": "a"}, "rejected": "b"}, PAIR, "field 'chosen' holds dict, not text"),
        (
            {"messages": [ASKED, {**ANSWERED, "train_detail": [{}]}]},
            {},
            r"x:1: a message's `train_detail` has \{\}: a ",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None, "train_detail": [PART]}]},
            {},
            "content` is no text",
        ),
        ({"messages": [{**ASKED, "train_detail": [PART]}, ANSWERED]}, {}, "x:1: a message of role 'user' has `train_d"),
        ({"messages": [ASKED, {**ANSWERED, "train_detail": [{**PART, "end_offset": -1}]}]}, {}, "train_detail` has"),
        ({"messages": [{**ASKED, "train": True}, ANSWERED]}, {}, "x:1: a message of role 'user' has `train`: True"),
        ({"prompt": 1, "completion": "x"}, {}, "x:1: field 'prompt' holds int, not text"),
    ],
)
def test_invalid_record_gets_one_line(record: dict[str, Any], keys: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(record, **keys)


def test_a_later_record_without_the_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    good, bad = record_documents(tmp_path / "a.jsonl", DataSection(path="x"))
    assert (good.blank, good.reason, bad.blank, bad.reason) == (False, None, True, MISSING_FIELD)
    assert bad.where.endswith("a.jsonl:2: no field 'completion'; there are prompt")


def test_tokenizer_training_uses_document_words() -> None:
    assert words("a text", "text") == ["a text"]
    assert words(json.dumps(CHAT), "messages") == ["hi", "yes"]
    assert words(json.dumps({"prompt": "hi", "completion": "yes"}), "prompt") == ["hi", "yes"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "x", "sources": [{"name": "a", "path": "x"}]}, "exactly one of data.path .* and data.sources"),
        ({"sources": []}, "data.sources is empty"),
        ({"sources": [{"name": "a", "path": "x"}] * 2}, "data.sources: two sources are called a: rename one"),
        ({"sources": [{"name": "a", "path": "x", "weight": 1}, {"name": "b", "path": "y"}]}, "a weight, or none"),
        ({"sources": [{"name": "a"}]}, "source a: give exactly one of path and dataset"),
        (
            {"path": "x", "eval_sources": [{"name": "a", "path": "x"}] * 2},
            "data.eval_sources: two sources are called a: rename one",
        ),
    ],
)
def test_contradictory_sections(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSection(**keys)


def test_late_input_field_and_null_system_text() -> None:
    found = format_of(DataSection(path="x"), {"instruction": "add", "output": "ok", "system": "be kind"}, "x:1")
    second = {"instruction": "translate", "input": "Guten Tag", "output": "Good day"}
    assert json.loads(found.read(second, "x:2").text)["input"] == "Guten Tag"
    first = json.loads(found.read({"instruction": "add", "output": "ok", "system": "be kind"}, "x:1").text)
    assert (first["input"], first["system"]) == ("", "be kind")


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}


def test_calls_stay_and_null_calls_are_dropped() -> None:
    for given in ('{"a": 1}', "not JSON", "[1]", {"a": 1}):
        flat = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": given}], "k": 1}
        assert read({"messages": [flat]})[0] == {"messages": [flat], "context": 0}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    as_json = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}
    assert read({"messages": [ASKED, as_json]})[0]["messages"][1] == called
    for broken in ("add(1, 2)", [{"arguments": {}}], [{"function": "add"}], {"name": 1}):
        assert read({"messages": [ASKED, {**called, "tool_calls": broken}]})[0]["left_out"] == UNREADABLE_CALL
    assert read({"messages": [ASKED, {**called, "function_call": "add"}]})[0]["left_out"] == UNREADABLE_CALL


@pytest.mark.parametrize(
    "flag", ["weight", "train", "training", "train_detail", "loss", "loss_scale", "trainable", "loss_mask"]
)
def test_label_flags_of_other_frameworks(flag: str) -> None:
    assert [is_learned({**ANSWERED, flag: value}) for value in (0, False, 1, True, None)] == [False] * 2 + [True] * 3
    assert read({"messages": [ASKED, {**ANSWERED, flag: 0}]})[0]["messages"][1] == {**ANSWERED, flag: 0}


@pytest.mark.parametrize("record", [{"messages": [ASKED, ANSWERED]}, {"prompt": "hi", "completion": "yes"}])
def test_loss_flags_of_a_record_are_obeyed(record: dict[str, Any]) -> None:
    for flags in ({"train": False}, {"weight": 0}, {"weight": "0"}, {"trainable": "False", "weight": 1}):
        with pytest.raises(BadRecordError) as error:
            read({**record, **flags})
        assert error.value.reason == "a record that its own loss flag excludes, left out"
    with pytest.raises(BadRecordError, match=r"the record's `weight` is 0\.5: a record is learned or not"):
        read({**record, "weight": 0.5})
    for flags in ({"train": True}, {"weight": "1"}, {"loss": 2.3}, {"weight": None}):
        assert read({**record, **flags}) == read(record)


def test_a_call_of_sharegpt_is_the_assistants() -> None:
    said = [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "add", "arguments": "{}"}'}]
    asked, called = read({"conversations": said})[0]["messages"]
    assert (asked, called["role"], called["content"]) == (ASKED, "assistant", "")
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    for role, value in (("function_call", "add 1 and 2"), ("tool_call", "{'name': 'add'}")):
        said[1] = {"from": role, "value": value}
        assert read({"conversations": said})[0]["left_out"] == UNREADABLE_CALL


def test_messages_may_be_json() -> None:
    assert read({"messages": json.dumps([ASKED, ANSWERED])}) == (CHAT, "messages")
    assert read({"messages": " "}) == ("", "messages")
    with pytest.raises(UserError, match="x:1: field 'messages' holds text that is not JSON"):
        read({"messages": "[hello"})


def test_system_and_tools_are_read_with_prompts() -> None:
    found = format_of(DataSection(path="x"), {"prompt": "hi", "completion": "yes"}, "x:1")
    beside = {"system": "be kind", "tools": json.dumps([CALL])}
    plain = json.loads(found.read({"prompt": "hi", "completion": "yes", **beside}, "x:2").text)
    assert plain == {"prompt": "hi", "completion": "yes", "system": "be kind", "tools": [CALL]}
    listed = json.loads(found.read({"prompt": [ASKED], "completion": [ANSWERED], **beside}, "x:3").text)
    system = {"role": "system", "content": "be kind"}
    assert listed == {"messages": [system, ASKED, ANSWERED], "context": 2, "tools": [CALL]}
    assert words(json.dumps(plain), "prompt") == ["hi", "yes", "be kind"]


def test_history_precedes_its_instruction() -> None:
    record = {"instruction": "hi", "output": "yes", "history": [["one", "two"], ["three", "four"]], "system": "s"}
    document, kind = read(record)
    assert [message["content"] for message in document["messages"]] == ["s", "one", "two", "three", "four", "hi", "yes"]
    assert (kind, document["context"], document["messages"][-2:]) == ("instruction", 0, [ASKED, ANSWERED])
    assert read({**record, "history": []})[0] == {"instruction": "hi", "input": "", "output": "yes", "system": "s"}
    with pytest.raises(UserError, match="x:1: field 'history' must be a list of pairs"):
        read({**record, "history": ["one"]})


def test_record_of_another_format_is_not_blank() -> None:
    found = format_of(DataSection(path="x"), {"messages": [ASKED]}, "x:1")
    with pytest.raises(UserError, match=r"x:2: 'messages' is null here, but 'text' is not: .* data\.sources"):
        found.read({"messages": None, "text": "a story"}, "x:2")
    assert found.read({"messages": None, "text": None, "prompt": "no completion"}, "x:3").text == ""
    names = ["id", "text", "tools", "messages"]
    assert format_of(DataSection(path="x"), names, "x").columns(names) == names[1:]
    named = format_of(DataSection(path="x", text_field="text"), {"text": "", "messages": [ASKED]}, "x:1")
    assert named.read({"text": None, "messages": [ASKED]}, "x:1").text == "", "somebody has chosen"


@pytest.mark.parametrize("said", [{"messages": [ASKED, ANSWERED]}, {"prompt": "hi", "completion": "yes"}])
def test_deep_nesting_is_one_line(said: dict[str, Any]) -> None:
    tool: dict[str, Any] = {}
    for _ in range(5000):
        tool = {"parameters": tool}
    with pytest.raises(UserError, match=r"^x:1: lists and mappings nest more than 100 levels deep in this record$"):
        read({**said, "tools": [tool]})


@pytest.mark.parametrize(
    ("record", "prompt", "answers"),
    [
        ({"prompt": "hi ", "chosen": "yes", "rejected": "no"}, "hi ", ("yes", "no")),
        ({"chosen": "hi? yes", "rejected": "hi? no"}, "hi?", (" yes", " no")),
        ({"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [NO]}, [ASKED], ([ANSWERED], [NO])),
        ({"prompt": "hi", "chosen": [ANSWERED], "rejected": [NO]}, [ASKED], ([ANSWERED], [NO])),
        ({"prompt": [ASKED], "chosen": "yes", "rejected": "no"}, [ASKED], ([ANSWERED], [NO])),
        # The prompt is in both chats, which a column `prompt` repeats.
        ({"chosen": [ASKED, ANSWERED], "rejected": [ASKED, NO]}, [ASKED], ([ANSWERED], [NO])),
        ({"prompt": "hi", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, NO]}, [ASKED], ([ANSWERED], [NO])),
        # Other names of a prompt.
        ({"question": "hi", "chosen": "hi yes", "rejected": "hi no"}, "hi", ("hi yes", "hi no")),
        ({"prompt": "hi", "question": "h", "chosen": "yes", "rejected": "no"}, "hi", ("yes", "no")),
        ({"query": "hi", "response": "yes", "rejected_response": "no"}, "hi", ("yes", "no")),
        (
            {"instruction": "h", "input": "i", "chosen": [ANSWERED], "rejected": "no"},
            [{**ASKED, "content": "h\n\ni"}],
            ([ANSWERED], [NO]),
        ),
        # ms-swift, axolotl, LLaMA-Factory.
        ({"messages": [ASKED, ANSWERED], "rejected_response": "no"}, [ASKED], ([ANSWERED], [NO])),
        ({"messages": [ASKED], "chosen": ANSWERED, "rejected": NO}, [ASKED], ([ANSWERED], [NO])),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "yes"},
                "rejected": NO,
            },
            [ASKED],
            ([ANSWERED], [NO]),
        ),
        (
            {"messages": [ASKED, ANSWERED], "chosen": [ASKED, ANSWERED], "rejected": [ASKED, NO]},
            [ASKED],
            ([ANSWERED], [NO]),
        ),
        # Messages as the text of a table.
        ({"chosen": json.dumps([ASKED, ANSWERED]), "rejected": json.dumps([ASKED, NO])}, [ASKED], ([ANSWERED], [NO])),
        # A common beginning ends with a word.
        (
            {"chosen": "Ask: why?\n\nTell: Happy", "rejected": "Ask: why?\n\nTell: Hard"},
            "Ask: why?\n\nTell:",
            (" Happy", " Hard"),
        ),
        ({"chosen": "Happy to", "rejected": "Harry"}, "", ("Happy to", "Harry")),
        ({"chosen": "川は。阿", "rejected": "川は。阿尔"}, "川は。", ("阿", "阿尔")),
        # An empty answer is no blank record: it is counted when the answers are encoded.
        ({"prompt": "hi", "chosen": "yes", "rejected": ""}, "hi", ("yes", "")),
        ({"prompt": "hi", "chosen": None, "rejected": "no"}, "hi", ("", "no")),
        ({"prompt": "hi", "chosen": [ANSWERED], "rejected": []}, [ASKED], ([ANSWERED], [])),
    ],
)
def test_pairs_of_answers_have_one_prompt(record: dict[str, Any], prompt: Any, answers: tuple[Any, Any]) -> None:
    pair, kind = read({"messages": [], **record}, **PAIR)
    assert kind == "preference"
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if isinstance(prompt, str):
            assert pair[name] == {"prompt": prompt, "completion": answer}
        else:
            assert pair[name] == {"messages": [*prompt, *answer], "context": len(prompt)}


def test_pairs_with_an_instruction_have_the_form_of_alpaca() -> None:
    record = {"system": "s", "instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4"}
    parts = {"instruction": "add", "input": "1 2", "system": "s"}
    assert read(record, **PAIR)[0] == {"chosen": {**parts, "output": "3"}, "rejected": {**parts, "output": "4"}}


@pytest.mark.parametrize(
    ("record", "keys", "notes"),
    [
        ({"text": "hi", "title": "Aare", "id": "17", "year": 1}, {}, [(UNREAD, "title")]),
        ({"text": "hi Aare", "title": "Aare"}, {}, []),
        ({"text": "hi", "title": "Aare"}, {"unused_fields": ["title"]}, []),
        (
            {"prompt": "hi", "completion": "yes", "messages": [ASKED], "url": "example"},
            {},
            [(UNREAD, "completion, url")],
        ),
        ({"instruction": "a", "output": "c", "response": "d", "system": "e"}, {}, [(UNREAD, "response")]),
        ({"prompt": "hi", "completion": "yes", "history": "more"}, {}, [(UNREAD, "history")]),
        ({"prompt": "hi", "question": "why", "chosen": "a", "rejected": "b"}, PAIR, [(UNREAD, "question")]),
        ({"chosen": "hi a", "rejected": "hi b", "at": "2024-05-01"}, PAIR, [(IMPLICIT_PROMPT, "")]),
        ({"chosen": "hi a", "rejected": "hi b", "by": "x"}, {**PAIR, "unused_fields": ["by"]}, [(IMPLICIT_PROMPT, "")]),
    ],
)
def test_text_in_unread_fields_is_counted(
    record: dict[str, Any], keys: dict[str, Any], notes: list[tuple[str, str]]
) -> None:
    form = format_of(DataSection(path="x", **keys), record, "x:1")
    assert list(form.read(record, "x:1").notes) == notes


def test_columns_of_text_that_are_not_read_are_named_once(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["a", "b"], "title": ["c", "d"], "url": ["e", "f"], "n": [1, 2]}), tmp_path / "a.parquet"
    )
    found = record_documents(tmp_path / "a.parquet", DataSection(path="x", unused_fields=["url"]))
    assert [document.notes for document in found] == [((UNREAD_COLUMNS, "title"),), ()]
    pq.write_table(pa.table({"chosen": ["a"], "rejected": ["b"], "ask": ["c"]}), tmp_path / "b.parquet")
    (pair,) = record_documents(tmp_path / "b.parquet", DataSection(path="x", **PAIR))
    assert pair.reason == UNCLEAR_PROMPT


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hi", "completion": "yes", "label": "True"},
        {"question": "hi", "answer": "yes", "kto_tag": "1.0"},
        {"messages": [ASKED, ANSWERED], "label": True},
        {"conversations": json.dumps([ASKED, ANSWERED]), "kto_tag": " true "},
    ],
)
def test_rated_answers_of_other_trainers(record: dict[str, Any]) -> None:
    answer, kind = read(record, **RATED)
    whole = {"prompt": "hi", "completion": "yes"} if "yes" in record.values() else {**CHAT, "context": 1}
    assert (answer, kind) == ({**whole, "label": True}, "rated")


@pytest.mark.parametrize("label", [True, False, 1, 0, None, "yes"])
def test_rated_answers_are_desirable_or_not(label: Any) -> None:
    fields = {"prompt": "prompt", "completion": "completion", "label": "good"}
    if label is None or label == "yes":
        with pytest.raises(BadRecordError, match="field 'good' must be true or false"):
            read({"prompt": "hi", "completion": "yes", "good": label}, **fields)
        return
    answer, kind = read({"prompt": "hi", "completion": "yes", "good": label}, **fields)
    assert (answer, kind) == ({"prompt": "hi", "completion": "yes", "label": bool(label)}, "rated")
    chat, _ = read({"prompt": [ASKED], "completion": [ANSWERED], "good": label}, **fields)
    assert chat == {"messages": [ASKED, ANSWERED], "context": 1, "label": bool(label)}


def test_pairs_need_an_objective() -> None:
    with pytest.raises(UserError, match=r"set train\.objective, for example to dpo"):
        read({"prompt": "hi", "chosen": "yes", "rejected": "no"})
    assert read({"chosen": None, "rejected": ""}, **PAIR)[0] == ""


def test_answers_to_a_prompt_share_its_hash_in_every_form() -> None:
    hashes = []
    for asked, field, answers in [
        ({"prompt": "Why?"}, "completion", ["!", "No."]),
        ({"prompt": "Why"}, "completion", ["!", "No."]),
        ({"prompt": [ASKED]}, "completion", [[ANSWERED], [NO]]),
        ({"prompt": [{**ASKED, "content": "How?"}]}, "completion", [[ANSWERED], [NO]]),
        ({"instruction": "Why?"}, "output", ["!", "No."]),
        ({}, "messages", [[ASKED, ANSWERED], [ASKED, NO]]),
    ]:
        records = [{**asked, field: answer, "label": answer == answers[0]} for answer in answers]
        hashes.append({prompt_hash(read(record, **RATED)[0]) for record in records})
    assert [len(one) for one in hashes] == [1] * 6 and hashes[5] == hashes[2] and len(set.union(*hashes)) == 5
