"""Whether a run goes on with what its checkpoint was saved under: data, model, settings; what differs, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aliquot.core.errors import ResumeError

_MOST_TOLD = 3
_OF_VOCABULARY = ("tokenizer", "tokenizer_vocab_size")
_NOT_SET = object()


def check_continuity(state: Mapping[str, Any], determinants: Mapping[str, Any], where: Path) -> None:
    """The next batch is only the next one if all that data order depends on is as it was, and an adapter only goes on
    as it was scaled, beside the model that it was learned beside.

    Raises UserError naming each setting that differs.
    """
    before = state["determinants"]
    changed = [key for key, value in determinants.items() if before.get(key) != value]
    if not changed:
        return
    told = "; ".join(f"{key} was {before.get(key)!r} and is {determinants[key]!r}" for key in changed)
    anew = "start anew under another run.name"
    if not any(key.startswith(("adapter", "model")) for key in changed):  # else these weights do not suit it
        anew += f" with {'adapter' if state['config'].get('adapter') else 'model'}.path set to this directory"
    raise ResumeError(f"cannot continue on the same data: {told}. Set it back, or {anew}", where)


def check_model(state: Mapping[str, Any], model: Mapping[str, Any], where: Path) -> str | None:
    """The same weights are another model under another configuration. `model`: as of models/computed.py.

    Raises UserError naming each key that differs. Another version of transformers may read the same file otherwise:
    then they are returned, to be warned of. Older checkpoints do not tell.
    """
    saved = state.get("model")
    if saved is None:
        return None
    before, now = saved["config"], model["config"]
    known = before.keys() & now.keys()
    changed = list(_differences({key: before[key] for key in known}, {key: now[key] for key in known}))
    if not changed:
        return None
    told = f"the model's configuration is another: {_few(changed)}"
    if saved["transformers"] != model["transformers"]:
        return f"{told}; transformers was {saved['transformers']} and is {model['transformers']}"
    raise ResumeError(f"{told}. Set it back, or start anew under another run.name", where)


def changes(state: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """`section.key was A and is B` for what differs from the config that the checkpoint was saved under."""
    return [
        f"{section}.{key} was {before!r} and is {config[section][key]!r}"
        for section in ("model", "data", "train")
        for key, before in state["config"][section].items()
        if key in config[section] and config[section][key] != before
    ]


def tensors_follow_from(state: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What differs of the settings that tensors, and which of them learn, follow from; empty: nothing."""

    def chosen(of: Mapping[str, Any]) -> dict[str, Any]:
        data = {key: of.get("data", {}).get(key) for key in _OF_VOCABULARY}
        train = {"freeze": of.get("train", {}).get("freeze")}
        return {"model": of.get("model") or {}, "data": data, "train": train, "adapter": of.get("adapter") or {}}

    return _few(list(_differences(chosen(state.get("config", {})), chosen(config))))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> Iterator[str]:
    for key in sorted({*before, *now}):
        one, other = before.get(key, _NOT_SET), now.get(key, _NOT_SET)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{of}{key}.")
        elif one != other:
            yield f"{of}{key} was {_shown(one)} and is {_shown(other)}"


def _few(told: list[str]) -> str:
    more = f", and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return "; ".join(told[:_MOST_TOLD]) + more


def _shown(value: Any) -> str:
    return "not set" if value is _NOT_SET else repr(value)[:100]
