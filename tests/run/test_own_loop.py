"""Loops, losses and data of the caller: exact against a plain loop, the same on any ranks, and no deadlock."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import aliquot
from aliquot.core.errors import UsageError
from aliquot.run.sampling import rows_at_once
from tests import plain
from tests.multinode.namespaces import switched_hosts, why_not
from tests.runs import curve, free_port, wait_for, write_config
from tests.tools import warm
from tests.tools.architectures import small_config

# The script of a person. Its loop trains by two losses, and computes log-probabilities of both models.
SCRIPT = """\
import json, os, sys
import torch
import aliquot
from aliquot import TokenSequence, losses

def sequences(step):
    drawn = torch.Generator().manual_seed(step)
    return [
        TokenSequence(
            torch.randint(0, 250, (length,), generator=drawn).tolist(),
            [place >= 3 for place in range(length)],
            {"advantages": torch.randn((), generator=drawn).item(), "logprobs": [-5.5] * length},
        )
        for length in (9, 17, 5, 30, 12)
    ]

def gap(logprobs, pair):
    return (logprobs[0].mean() - logprobs[1].mean() + 1).square()

def no_scalar(logprobs, sequence):
    return logprobs

def not_finite(logprobs, sequence):
    return (logprobs * float("inf")).sum()

def no_gradient(logprobs, sequence):
    return logprobs.detach().sum()

def failing(logprobs, sequence):
    if len(logprobs) == 14:
        raise KeyError("no such thing")  # line 31
    return logprobs.sum()

def main():
    config = aliquot.read_config(sys.argv[1], sys.argv[3:])
    mistake, rows = os.environ.get("MISTAKE"), []
    with aliquot.Trainer(config) as trainer:
        mine = slice(trainer.ranks.rank, None, trainer.ranks.world_size)
        for step in trainer.steps():
            batch = sequences(step)
            if mistake == "step":
                trainer.optim_step()
            elif mistake == "twice":
                trainer.forward_backward(batch, scatter=True)
            elif mistake == "long" and trainer.ranks.rank:
                batch.append(TokenSequence([1] * 33))
            elif mistake == "divisor":
                trainer.forward_backward(batch, divisor=1 + trainer.ranks.rank)
            elif mistake in globals():
                trainer.forward_backward(batch[mine], globals()[mistake])
            before = trainer.forward(batch[mine])
            reference = trainer.forward(batch, reference=True, scatter=True)
            first = trainer.forward_backward(batch, losses.ppo(), 5, accumulate=True, scatter=True)
            pairs = list(zip(batch[:2], batch[2:4]))
            second = trainer.forward_backward(pairs[mine], gap, divisor=2)
            norm = trainer.optim_step().grad_norm
            trainer.state["steps"] = trainer.state.get("steps", 0) + 1
            trainer.log(reward=step / 2)
            sums = trainer.ranks.gather(sum(values.sum().item() for values in before))
            rows.append([first, second, norm, sum(sums), sum(values.sum().item() for values in reference)])
            if os.environ.get("ENDLESS"):
                print("step", step, flush=True)
        samples = trainer.sample(["a b", "the", "on a"], n=2, max_tokens=6, stop=["e"], seed=3)
        again = trainer.forward([sample.sequence() for sample in samples])
        error = max((a - torch.tensor(s.logprobs)).abs().max().item() for a, s in zip(again, samples))
        greedy = trainer.sample([[0, 9, 17]], temperature=0.0, max_tokens=5)[0].ids
        trainer.export()
    if trainer.ranks.rank == 0:
        found = {"rows": rows, "state": trainer.state, "samples": [s.ids for s in samples], "greedy": greedy}
        open(sys.argv[2], "w").write(json.dumps({**found, "error": error}))

if __name__ == "__main__":
    try:
        main()
    except aliquot.UserError as error:
        sys.exit(error.line)
"""


def start(folder: Path, ranks: int, config: Path, *overrides: str, **environment: str) -> list[subprocess.Popen[str]]:
    script = folder / "loop.py"
    script.write_text(SCRIPT)
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **environment}
    return [
        warm.popen(
            script, config, folder / "found.json", *overrides,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, errors) by rank."""
    outputs = [process.communicate(timeout=200)[1] for process in processes]
    return [(process.returncode, errors) for process, errors in zip(processes, outputs, strict=True)]


def found(folder: Path, ranks: int, config: Path, *overrides: str) -> dict[str, Any]:
    ends = ended(start(folder, ranks, config, *overrides))
    assert {code for code, _ in ends} == {0}, ends
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


def settings(folder: Path, **sections: Any) -> Path:
    plain.save_llama(folder / "model")
    train = {"max_steps": 4, "eval_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, **sections.pop("train", {})}
    model = {"config": None, "path": str(folder / "model")}
    return write_config(folder, model=model, train=train, checkpoint={"every": 2}, **sections)


def plain_rows(folder: Path, config: Path) -> list[list[float]]:
    """The same loop in plain transformers and PyTorch, in fp32."""
    namespace: dict[str, Any] = {"__name__": "loop"}
    exec(SCRIPT, namespace)  # its sequences and its loss
    train = aliquot.read_config(config).train
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2))
    groups = plain.parameter_groups(dict(model.named_parameters()), train.weight_decay)
    betas = (train.adam_beta1, train.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_epsilon)
    scheduler = plain.get_scheduler(train.lr_scheduler_type, optimizer, train.warmup_steps, 4)

    def logprobs(model: nn.Module, sequence: aliquot.TokenSequence) -> Tensor:
        ids = torch.tensor(sequence.ids)
        values = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return values[sequence.mask[1:]]

    rows = []
    for step in range(4):
        batch = namespace["sequences"](step)
        with torch.no_grad():
            sums = [float(sum(logprobs(m, s).sum() for s in batch)) for m in (model, reference)]
        first = sum(aliquot.losses.ppo()(logprobs(model, s), s) for s in batch) / 5
        pairs = zip(batch[:2], batch[2:4], strict=True)
        second = sum(namespace["gap"]([logprobs(model, s) for s in pair], pair) for pair in pairs) / 2
        (first + second).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rows.append([float(first), float(second), float(norm), *sums])
    return rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, found(folder, 1, settings(folder))


def test_equals_a_plain_loop(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, result = alone
    expected = plain_rows(folder, folder / "run.yaml")
    for row, values in zip(result["rows"], expected, strict=True):
        assert row == pytest.approx(values, rel=1e-5, abs=1e-5)
    assert result["state"] == {"steps": 4} and result["error"] < 1e-5
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines if "reward" in line] == [0, 0.5, 1, 1.5]
    assert list(curve(folder / "run", "eval_loss")) == [2, 4] and (folder / "run" / "export").is_dir()


def test_greedy_samples_are_those_of_transformers(alone: tuple[Path, dict[str, Any]]) -> None:
    folder, result = alone
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "export", dtype=torch.float32)
    ids = torch.tensor([[0, 9, 17]])
    mask = torch.ones_like(ids)
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)[0].tolist()
    assert result["greedy"] == generated[: len(result["greedy"])] and len(result["greedy"]) > 3


def test_samples_and_references_keep_to_the_memory_of_the_plan(tmp_path: Path) -> None:
    prompts = ["a b", "the", "on a"]
    with aliquot.Trainer(aliquot.read_config(settings(tmp_path))) as trainer:
        together = trainer.sample(prompts, max_tokens=6)
        assert rows_at_once(trainer, 40) == 64
        plan = trainer.resolved.plan
        assert plan is not None
        full = dataclasses.replace(plan, limit_bytes_per_node=plan.peak_bytes_per_rank)
        trainer.resolved = dataclasses.replace(trainer.resolved, plan=full)
        assert rows_at_once(trainer, 10_000) == 1
        assert [sample.ids for sample in trainer.sample(prompts, max_tokens=6)] == [sample.ids for sample in together]
        small = dataclasses.replace(plan, limit_bytes_per_node=0)
        trainer.resolved = dataclasses.replace(trainer.resolved, plan=small)
        with pytest.raises(UsageError, match=r"needs 0.00 GiB on each rank .* use more ranks or machines"):
            trainer.forward([aliquot.TokenSequence([1, 2, 3])], reference=True)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, []),
        (2, ["shard.engine=fsdp", "data.packing=false"]),
        pytest.param(3, [], marks=pytest.mark.long),
        pytest.param(3, ["shard.engine=fsdp"], marks=pytest.mark.long),
        pytest.param(2, ["shard.engine=deepspeed"], marks=pytest.mark.long),
        pytest.param(2, ["train.gradient_checkpointing=full"], marks=pytest.mark.long),
    ],
)
def test_ranks_and_engines_agree(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, ranks: int, overrides: list[str]
) -> None:
    result = found(tmp_path, ranks, settings(tmp_path), *overrides)
    for row, values in zip(result["rows"], alone[1]["rows"], strict=True):
        assert row == pytest.approx(values, rel=1e-5, abs=1e-5)
    assert result["samples"] == alone[1]["samples"] and result["error"] < 1e-5


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_two_hosts_agree(alone: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Weights cross the network after an update, and must have arrived before those of the reference are written."""
    config, script = settings(tmp_path), tmp_path / "loop.py"
    script.write_text(SCRIPT)
    with switched_hosts(2) as hosts:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": hosts[0].address}
        world |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        ends = ended(
            [
                subprocess.Popen(
                    host.command(sys.executable, str(script), str(config), str(tmp_path / "found.json")),
                    env={**os.environ, **world, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
                )
                for rank, host in enumerate(hosts)
            ]
        )  # fmt: skip
    assert [code for code, _ in ends] == [0, 0], ends
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    for row, values in zip(rows, alone[1]["rows"], strict=True):
        assert row == pytest.approx(values, rel=1e-5, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gemma2", "mamba", "qwen3_moe"])
def test_other_heads_and_models(tmp_path: Path, architecture: str) -> None:
    """Logits with a soft-cap, a model that is called once per document, and experts: one rank equals two."""
    config, results = {**small_config(architecture, dropout=False).to_dict(), "vocab_size": 300}, []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        results.append(found(folder, ranks, write_config(folder, model={"config": config}, train={"max_steps": 2})))
    for row, values in zip(results[0]["rows"], results[1]["rows"], strict=True):
        assert row == pytest.approx(values, rel=1e-4, abs=1e-4)


@pytest.mark.long
def test_lora_has_the_base_model_as_its_reference(tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        results.append(found(folder, ranks, settings(folder, adapter={"type": "lora", "r": 4})))
    assert results[0]["rows"][-1] == pytest.approx(results[1]["rows"][-1], rel=1e-5)
    first, last = results[0]["rows"][0], results[0]["rows"][-1]
    assert first[3] == pytest.approx(first[4]) and last[3] != pytest.approx(last[4], rel=1e-4)


MISTAKES = {
    "step": "optim_step needs a gradient",
    "twice": "all calls of a step but the last need accumulate=True",
    "long": "a sequence has 33 tokens: raise data.sequence_length",
    "divisor": "ranks differ in their loss: cross_entropy over 1 and cross_entropy over 2",
    "no_scalar": r"no_scalar failed: TypeError: a loss must be a scalar tensor, not a tensor of shape \[6\]",
    "not_finite": "not_finite failed: ValueError: the loss or its gradient is not finite",
    "no_gradient": "no_gradient failed: ValueError: the loss has no gradient",
    "failing": "loop.py:31: failing failed: KeyError: 'no such thing'",
}


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=[] if m in ("failing", "long") else pytest.mark.long) for m in MISTAKES]
)
def test_a_mistake_ends_all_ranks_with_one_line(tmp_path: Path, mistake: str) -> None:
    for code, errors in ended(start(tmp_path, 2, settings(tmp_path), MISTAKE=mistake)):
        assert code == 1 and re.search(MISTAKES[mistake], errors.splitlines()[-1]), errors
        assert "Traceback" not in errors


def test_a_killed_loop_continues_with_its_state(alone: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    config = settings(tmp_path)
    [process] = start(tmp_path, 1, config, ENDLESS="1")
    wait_for((tmp_path / "run" / "checkpoints" / "step-00000002").is_dir, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    result = found(tmp_path, 1, config)
    assert result["state"] == {"steps": 4}
    assert result["rows"][-1] == pytest.approx(alone[1]["rows"][-1], rel=1e-6)


def test_sequences_are_checked_where_they_are_made() -> None:
    with pytest.raises(UsageError, match="2 values of advantages"):
        aliquot.TokenSequence([1, 2, 3, 4], arrays={"advantages": [1.0, 2.0]})
    with pytest.raises(UsageError, match="3 ids, but 1 values of learned"):
        aliquot.TokenSequence([1, 2, 3], [True])
    with pytest.raises(UsageError, match="no token to learn"):
        aliquot.TokenSequence([1, 2], [True, False])
    sequence = aliquot.TokenSequence(
        [1, 2, 3], [True, False, True], {"weights": [5.0, 6.0, 7.0], "one": 2.0, "few": [8.0]}
    )
    assert [sequence[name].tolist() for name in ("weights", "one", "few")] == [[7.0], [2.0], [8.0]]
    assert torch.equal(sequence.mask, torch.tensor([False, False, True]))


@pytest.mark.long
def test_grpo_runs_on_a_real_model(shared: Path, tmp_path: Path) -> None:
    stories = (shared / "data" / "tinystories-train-head.txt").read_text().split("<|endoftext|>")[:80]
    data = tmp_path / "stories.jsonl"
    data.write_text("\n".join(json.dumps({"text": story.strip()}) for story in stories))
    output = ran(
        "grpo", "examples/grpo.yaml", f"model.path={shared}/models/stories260K", f"data.path={data}",
        f"run.directory={tmp_path}/run", "train.max_steps=2", "train.logging_steps=1", "launch.device=cpu",
    )  # fmt: skip
    assert re.search(r"mean reward of held-out prompts: 0\.\d+ before, 0\.\d+ after", output)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= line["reward"] <= 1 for line in lines if "reward" in line] == [True, True]


@pytest.mark.long
def test_distillation_and_curriculum_learn(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    words = [(a, b) for a in ("dog", "cat", "cow") for b in ("bird", "tree", "hat", "pig", "car", "sun")]
    texts.write_text("\n".join(json.dumps({"text": f"the {a} saw a {b} and the {b} saw the {a}"}) for a, b in words))
    steps = ["train.max_steps=20", "train.learning_rate=0.01", "train.lr_scheduler_type=constant"]
    teacher = write_config(tmp_path, "teacher")
    ran("curriculum", teacher, texts, *steps)
    export = tmp_path / "teacher" / "export"
    student = write_config(tmp_path, "student", data={"tokenizer_vocab_size": None, "tokenizer": str(export)})
    ran("distillation", student, export, texts, *steps)
    for name in ("teacher", "student"):
        losses = list(curve(tmp_path / name).values())
        assert losses[-1] < losses[0] - 1


def ran(example: str, *arguments: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = warm.popen(f"examples/{example}.py", *arguments, env=environment, stdout=subprocess.PIPE)
    output: str = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    return output
