"""The start-up proof passes correct engines and names planted errors, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aliquot.core.errors import UnsupportedModelError
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from aliquot.engines.startup_proof import _run_in_bf16
from aliquot.models.traits import traits
from tests.models.test_every_type import TYPES
from tests.processes import World, run_worlds
from tests.tools.architectures import small_config

RIGHT = ("llama:host:none", "gemma:host:none", "gpt2:host:none", "mistral:fsdp:none")
WRONG = (
    "llama:host:scale", "llama:host:leak", "llama:fsdp:leak", "llama:host:neighbours", "mistral:host:window",
    "gemma2:host:softcap", "gpt_oss:host:sinks", "gemma:host:contributions",
)  # fmt: skip
NEED_FP32 = ("inkling2_text", "minimax", "xglm", "xlstm")  # as docs/reference/models.md says


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("proof")
    run_worlds(Path(__file__).parent / "proof_worker.py", [World(2, folder, (*RIGHT, *WRONG))])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", RIGHT)
def test_proof_passes_correct_engines(outcomes: list[dict[str, str]], case: str) -> None:
    assert [rank_outcomes[case] for rank_outcomes in outcomes] == ["", ""]


def test_single_rank_computes_all_rows_of_the_proof(tmp_path: Path) -> None:
    cases = ("llama:host:none", "llama:host:leak")
    run_worlds(Path(__file__).parent / "proof_worker.py", [World(1, tmp_path, cases)])
    right, wrong = json.loads((tmp_path / "0.json").read_text()).values()
    assert right == "" and "would be trained wrongly" in wrong


@pytest.mark.parametrize("case", WRONG)
def test_proof_names_planted_errors(outcomes: list[dict[str, str]], case: str) -> None:
    first, second = (rank_outcomes[case] for rank_outcomes in outcomes)
    assert first == second and "would be trained wrongly" in first
    assert "\n" not in first and ("the gradient of " in first or "loss is " in first)


@pytest.mark.long
def test_proof_runs_deepspeed_and_the_run_starts_it_again(tmp_path: Path) -> None:
    """Weights and gradients of a bf16 run are bf16; those of the proof are fp32."""
    pytest.importorskip("deepspeed")
    if missing_tools():
        pytest.skip(f"DeepSpeed on CPUs needs {' and '.join(missing_tools())}")
    cases = ("llama:deepspeed:none", "llama:deepspeed:leak", "gemma:deepspeed:none")
    run_worlds(Path(__file__).parent / "proof_worker.py", [World(2, tmp_path, cases)])
    for rank in range(2):
        right, wrong, again = json.loads((tmp_path / f"{rank}.json").read_text()).values()
        assert right == again == "" and "would be trained wrongly" in wrong


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("xglm", "llama") else pytest.mark.long) for kind in TYPES]
)
def test_model_that_fails_in_bf16_is_refused_in_one_line(kind: str) -> None:
    config = small_config(kind, False)
    model_traits = traits(config)
    if kind not in NEED_FP32:
        return _run_in_bf16(config, model_traits, model_traits.plain_head)
    with pytest.raises(UnsupportedModelError, match=r"does not run with weights of bf16: .* train\.precision: fp32"):
        _run_in_bf16(config, model_traits, model_traits.plain_head)
