"""Model types of transformers against a plain loop: two here, all of them by `make test-long`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tools import warm

TWO = ("deepseek_v3", "qwen3_next")  # latent attention and experts; a recurrence


def outcomes(folder: Path, *arguments: str, timeout_s: float) -> list[dict[str, Any]]:
    file = folder / "outcomes.json"
    run = warm.run("-m", "tests.tools.architectures", *arguments, "--json", file, timeout_s=timeout_s)
    assert file.exists(), run.stdout + run.stderr
    return json.loads(file.read_text())


def test_two_kinds_of_models_are_exact(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--quick", "--types", ",".join(TWO), timeout_s=240)
    assert [(each["type"], each["verdict"]) for each in found] == [(name, "exact") for name in TWO], found


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_no_architecture_is_wrong(tmp_path: Path) -> None:
    found = outcomes(tmp_path, timeout_s=3 * 3600)
    assert [each["type"] for each in found] == list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert [each for each in found if each["verdict"] == "wrong"] == []
    assert sum(each["verdict"] == "exact" for each in found) >= 150
