"""The start-up proof passes correct engines and names planted errors, on every rank."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aliquot.core.errors import SelfTestError, UnsupportedModelError
from aliquot.distributed.topology import Topology
from aliquot.engines import model_engine
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine
from aliquot.engines.deepspeed.deepspeed_setup import missing_tools
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.host import host_gradients
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.startup_proof import _run_in_bf16, prove
from aliquot.models.traits import traits
from aliquot.nn.attention.document_attention import Documents
from aliquot.nn.attention.tiled_attention import TiledAttention
from tests.models.test_every_type import TYPES
from tests.processes import World, as_ranks, run_worlds
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
    run_worlds(Path(__file__), [World(2, folder, (*RIGHT, *WRONG))])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", RIGHT)
def test_proof_passes_correct_engines(outcomes: list[dict[str, str]], case: str) -> None:
    assert [rank_outcomes[case] for rank_outcomes in outcomes] == ["", ""]


def test_single_rank_computes_all_rows_of_the_proof(tmp_path: Path) -> None:
    cases = ("llama:host:none", "llama:host:leak")
    run_worlds(Path(__file__), [World(1, tmp_path, cases)])
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
    run_worlds(Path(__file__), [World(2, tmp_path, cases)])
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


KINDS: dict[str, type[Engine]] = {"host": HostEngine, "fsdp": FsdpEngine, "deepspeed": DeepspeedEngine}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}, "steps_per_print": None,
}  # fmt: skip


class Faulty(TiledAttention):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def attend(self, query: Any, key: Any, value: Any, documents: Any, scoring: Any) -> Any:
        if self.fault == "scale":
            scoring = replace(scoring, scaling=1.0)
        if self.fault == "softcap":
            scoring = replace(scoring, softcap=None)
        if self.fault == "sinks":
            scoring = replace(scoring, sinks=None)
        if self.fault == "window" and scoring.window is not None:
            scoring = replace(scoring, window=scoring.window + 1)
        if self.fault == "leak":
            key, value = (x.roll(-1, 2) for x in (key, value))
        if self.fault == "neighbours":
            documents = Documents((0, documents.edges[-1]), self)
        return super().attend(query, key, value, documents, scoring)


class Forgetful(Counter[int]):
    """Each contribution of a step is taken for its first: it replaces what is there."""

    def __getitem__(self, key: int) -> int:
        return 0


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    """Plant a fault, run the proof, and write what it says."""
    torch.set_num_threads(1)
    outcomes = {}
    for argument in arguments:
        model_type, engine, fault = argument.split(":")
        attention_on, contributions = model_engine.attention_on, host_gradients.Counter
        if fault == "contributions":
            host_gradients.Counter = Forgetful  # type: ignore[misc]
        elif fault != "none":
            model_engine.attention_on = lambda *_, fault=fault: Faulty(fault)  # type: ignore[assignment]
        topology = Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ())
        config = small_config(model_type, dropout=True)
        model_traits = traits(config)
        spec = EngineSpec(
            "bf16", 512, model_traits.plain_head, model_traits.packs, model_traits.looks_up, True,
            collectives="shared_memory",
            optimizer_states="int8" if engine == "host" else "fp32", micro_batches=1,
            deepspeed=DEEPSPEED if engine == "deepspeed" else None,
        )  # fmt: skip
        try:
            prove(config, model_traits, KINDS[engine], spec, topology)
            outcomes[argument] = ""
        except SelfTestError as error:
            outcomes[argument] = str(error)
        model_engine.attention_on, host_gradients.Counter = attention_on, contributions  # type: ignore[misc]
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    as_ranks(work)
