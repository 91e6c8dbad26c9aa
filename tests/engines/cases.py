"""The small models and batches that the engine proofs train on, shared by the ranks and the plain loop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from aliquot.config.adapter_section import AdapterSection
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec
from aliquot.models import initialize, meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.preference_loss import Objective, RatedAnswers

STEPS = 5
FAR = 20  # steps in which what is rounded shows
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
MAX_GRAD_NORM = 0.5  # below the norms of these runs, so that every step clips
SEED = 7
VOCABULARY = 67  # no world size above 1 divides it: ranks own unequal numbers of rows
SEQUENCES = 5  # per global batch: uneven over 2, 3 and 4 ranks
DOCUMENTS = 3  # of a sequence

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # The default of 0.02 leaves models of this size with hardly any attention to get wrong.
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class EngineSetup:
    """An engine, its ranks, and what is done to them: the axes of the tests that compare engines.

    As text: `engine=host,ranks=3,hosts=3,late=True`, the axes that differ from their default.
    """

    engine: Literal["host", "fsdp", "single_gpu", "deepspeed"]
    ranks: int
    hosts: int = 1
    numa_nodes: int = 1
    on_disk: Literal["nothing", "some states", "everything"] = "nothing"  # streamed layers of deep models, too
    late: bool = False  # messages between hosts are delayed at random
    flipped: Literal["nothing", "weights", "gradients"] = "nothing"  # a bit of what the second rank receives
    shared_memory: bool = False  # of engine fsdp
    replicas: int = 1  # of engine fsdp, each on a node of its own
    offload: bool = False  # to the memory of the host
    copies: bool = False  # engine host computes from a copy of the weights, as on a GPU
    copied_layers: int = 0  # and these of its layers are copied for each use
    like_gpu: bool = False  # engine fsdp takes a GPU's norm, and stand-ins for pinned memory
    uncompiled: bool = False  # DeepSpeed without its shared-memory op

    def __str__(self) -> str:
        axes = {axis.name: getattr(self, axis.name) for axis in fields(self)}
        defaults = {axis.name: axis.default for axis in fields(self)}
        return ",".join(f"{name}={value}" for name, value in axes.items() if value != defaults[name])

    def as_argument(self) -> str:
        """The setup as an argument of worker.py."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, object]
    precision: str = "fp32"
    checkpointing: str = "none"
    states: str = "fp32"
    compile: str = "none"
    steps: int = STEPS
    once: bool = False  # a micro-batch a rank and step: sums over hosts are then made as those over ranks
    reduce_dtype: str = "fp32"
    freeze: tuple[str, ...] = ()
    adapter: AdapterSection | None = None
    evaluated_first: bool = False
    written_twice: bool = False  # the weights are written again after an evaluation, as after that of a reference
    rated: bool = False  # the documents are rated answers, for KTO

    def micro_batch(self, sequence: list[Tensor]) -> MicroBatch:
        batch = micro_batch(sequence)
        return replace(batch, row_loss=rated_answers(sequence)) if self.rated else batch

    def documents(self, step: int, world_size: int) -> list[list[Tensor]]:
        batch = documents(step)
        return batch[:world_size] if self.once else batch


# Deep enough that for evaluation transformers would divide weights.
RWKV = {"model_type": "rwkv", "num_hidden_layers": 2, "rescale_every": 1, "context_length": 64}

EXPERTS = {"num_experts": 24, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}

# Two of its four layers are dense; the others' routers have biases, which learn nothing.
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 7, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "moe_intermediate_size": 20, "num_key_value_heads": 4,
}  # fmt: skip

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Wide enough for blocks of 64 in most matrices; the rows of o_proj have 32 elements, which stay as they are.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 3}
NF4, INT8 = (AdapterSection(r=5, alpha=20, base=name) for name in ("nf4", "int8"))
LORA = AdapterSection(r=5, alpha=20)  # no world size above 1 divides it
LORA_OF_EXPERTS, NF4_OF_EXPERTS = (AdapterSection(r=5, alpha=20, experts=True, base=base) for base in ("bf16", "nf4"))

CASES = {
    case.name: case
    for case in [
        Case("llama", {"model_type": "llama"}, written_twice=True),
        Case("rwkv", RWKV, evaluated_first=True, steps=2),
        Case("deepseek-deep-bf16", DEEPSEEK, precision="bf16", steps=2),
        Case("mamba-bf16", {"model_type": "mamba", "state_size": 8}, precision="bf16"),
        Case("llama-once", {"model_type": "llama"}, once=True),
        Case("llama-bf16-once", {"model_type": "llama"}, precision="bf16", once=True, steps=3),
        Case("qwen2-tied-once", {"model_type": "qwen2", "tie_word_embeddings": True}, once=True, steps=3),
        Case("llama-reduced", {"model_type": "llama"}, precision="bf16", steps=FAR, reduce_dtype="bf16"),
        Case("llama-reduced-once", {"model_type": "llama"}, precision="bf16", once=True, reduce_dtype="bf16", steps=3),
        Case("llama-far", {"model_type": "llama"}, steps=FAR),
        Case("llama-bf16", {"model_type": "llama"}, precision="bf16", written_twice=True),
        Case("llama-bf16-rated", {"model_type": "llama"}, precision="bf16", rated=True, steps=2),
        Case("llama-bf16-far", {"model_type": "llama"}, precision="bf16", steps=FAR),
        Case("llama-compiled", {"model_type": "llama"}, precision="bf16", compile="layers", steps=FAR),
        Case("llama-int8", {"model_type": "llama"}, precision="bf16", states="int8", steps=2),
        Case("llama-frugal", {"model_type": "llama"}, precision="bf16", states="int8", steps=FAR),
        Case("llama-bf16-states", {"model_type": "llama"}, precision="bf16", states="bf16", steps=FAR),
        Case("gemma2", {"model_type": "gemma2", "query_pre_attn_scalar": 8, "attn_logit_softcapping": None}, steps=3),
        Case("llama-full", {"model_type": "llama"}, checkpointing="full", steps=3),
        Case("llama-selective", {"model_type": "llama"}, checkpointing="selective", steps=3),
        Case("qwen2-tied", {"model_type": "qwen2", "tie_word_embeddings": True}, steps=3),
        Case("qwen3", {"model_type": "qwen3"}),
        # Tied, and its embedding is a subclass: head and look-up contribute as wholes, one in the forward pass.
        Case("gemma", {"model_type": "gemma", "tie_word_embeddings": True}, steps=3),
        Case("gemma-untied", {"model_type": "gemma", "tie_word_embeddings": False}),
        # One block, in several layers. Two steps: those of AdamW amplify rounding more than in the others.
        Case(
            "zamba",
            {
                "model_type": "zamba",
                "num_hidden_layers": 4,
                "attention_hidden_size": 64,
                "attention_head_dim": 16,
                "n_mamba_heads": 2,
                "mamba_dt_rank": 4,
                "use_mamba_kernels": False,
                "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            },
            steps=2,
        ),
        Case(
            "llama-deep",
            {"model_type": "llama", "num_hidden_layers": 5},
            precision="bf16",
            steps=2,
            written_twice=True,
        ),
        Case(
            "llama-deep-compiled",
            {"model_type": "llama", "num_hidden_layers": 5},
            precision="bf16",
            compile="layers",
            steps=3,
        ),
        # Layers that are frozen wholly, in part and not at all, and what is trained beside frozen ones.
        Case(
            "llama-deep-frozen",
            {"model_type": "llama", "num_hidden_layers": 5},
            freeze=("model.embed_tokens.*", "model.layers.[03].*", "*.4.mlp.*"),
        ),
        Case(
            "moe-deep-frozen-int8",
            {"model_type": "qwen3_moe", "num_hidden_layers": 5, **EXPERTS},
            precision="bf16",
            states="int8",
            freeze=("model.embed_tokens.*", "model.layers.[03].*", "*.4.mlp.experts.*"),
            steps=3,
        ),
        Case(
            "llama-deep-lora", {"model_type": "llama", "num_hidden_layers": 5}, adapter=LORA, precision="bf16", steps=2
        ),
        Case(
            "llama-deep-lora-full",
            {"model_type": "llama", "num_hidden_layers": 5},
            adapter=LORA,
            checkpointing="full",
            steps=3,
        ),
        Case("llama-deep-full", {"model_type": "llama", "num_hidden_layers": 5}, checkpointing="full", steps=3),
        Case(
            "gemma3-deep-tied",
            {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 6, "query_pre_attn_scalar": 8},
            precision="bf16",
            checkpointing="full",
            steps=2,
        ),
        # More experts than choices: in most micro-batches some have no token.
        Case("moe", {"model_type": "qwen3_moe", **EXPERTS}, steps=3),
        Case(
            "moe-bf16-full",
            {
                "model_type": "gpt_oss",
                "num_local_experts": 24,
                "num_experts_per_tok": 2,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            precision="bf16",
            checkpointing="full",
            steps=2,
        ),
        Case("mistral-window", {"model_type": "mistral", "sliding_window": 6}, steps=3),
        # Neither what is looked up nor the layers above it learn.
        Case("llama-frozen", {"model_type": "llama"}, freeze=("model.embed_tokens.*", "model.layers.0.*"), steps=3),
        # Nothing before the head learns, or nothing but what comes first.
        Case("head-alone", {"model_type": "llama"}, freeze=("model.*",), steps=3),
        Case("embedding-alone", {"model_type": "llama"}, freeze=("model.layers.*", "lm_head.*"), steps=3),
        Case("qwen2-tied-frozen", {"model_type": "qwen2", "tie_word_embeddings": True}, freeze=("lm_head.*",), steps=3),
        Case("moe-frozen", {"model_type": "qwen3_moe", **EXPERTS}, freeze=("*.experts.*",), steps=3),
        Case("llama-lora", {"model_type": "llama"}, adapter=LORA, steps=3),
        Case("llama-lora-full", {"model_type": "llama"}, adapter=LORA, checkpointing="full", steps=3),
        Case("llama-lora-selective", {"model_type": "llama"}, adapter=LORA, checkpointing="selective", steps=3),
        Case("llama-lora-bf16", {"model_type": "llama"}, adapter=LORA, precision="bf16"),
        Case("llama-lora-once", {"model_type": "llama"}, adapter=LORA, precision="bf16", once=True),
        Case("qwen2-tied-lora", {"model_type": "qwen2", "tie_word_embeddings": True}, adapter=LORA, steps=3),
        # Its linear layers hold their weights the other way around.
        Case("gpt2-lora", {"model_type": "gpt2", **NO_DROPOUT}, adapter=LORA, steps=3),
        Case("llama-nf4", {"model_type": "llama", **WIDE}, adapter=NF4, steps=FAR),
        Case(
            "llama-nf4-full", {"model_type": "llama", **WIDE}, adapter=NF4, checkpointing="full", evaluated_first=True
        ),
        Case("llama-int8-base", {"model_type": "llama", **WIDE}, adapter=INT8, checkpointing="selective"),
        Case("qwen2-tied-nf4-bf16", {"model_type": "qwen2", **WIDE}, adapter=NF4, precision="bf16"),
        Case("gpt2-nf4", {"model_type": "gpt2", **WIDE, **NO_DROPOUT}, adapter=NF4, steps=FAR),
        Case("qwen3-nf4", {"model_type": "qwen3", **WIDE}, adapter=NF4, steps=FAR),
        Case(
            "mixtral-nf4",
            {"model_type": "mixtral", "num_local_experts": 4, **WIDE},
            # With all-linear, peft takes the experts' matrices as linear layers of twice the rank.
            adapter=AdapterSection(r=5, alpha=20, base="nf4", experts=True, target_modules=["q_proj", "v_proj"]),
            steps=FAR,
        ),
        Case(
            "gemma3-nf4",
            {"model_type": "gemma3_text", **WIDE, "sliding_window": 6, "query_pre_attn_scalar": 8},
            adapter=NF4,
            steps=FAR,
        ),
        Case("moe-nf4", {"model_type": "qwen3_moe", **WIDE, **EXPERTS}, adapter=NF4_OF_EXPERTS, steps=FAR),
        Case("moe-lora", {"model_type": "qwen3_moe", **EXPERTS}, adapter=LORA_OF_EXPERTS, steps=3),
    ]
}


def llama(
    kind: type[Any], model: dict[str, Any], rank: int, world_size: int, tokens: int = 64, seed: int = SEED, **spec: Any
) -> tuple[Any, int]:
    """An engine on one node with the initial weights of a Llama, and their number. `tokens`: of a micro-batch."""
    built = meta.build(AutoConfig.for_model("llama", **model))
    settings = EngineSpec(micro_batch_tokens=tokens, fused_loss=built.traits.plain_head, **spec)
    engine: Engine = kind.build(built.model, settings, Topology(rank, world_size, rank, world_size, 0, 1, "cpu", 1, ()))
    initialize.initialize(engine, built.fills, seed)
    engine.ready()
    return engine, built.numel


def documents(step: int) -> list[list[Tensor]]:
    """The global batch of a step: SEQUENCES sequences, each a list of documents of int64 tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    sequences = []
    for _ in range(SEQUENCES):
        lengths = torch.randint(2, 20, (DOCUMENTS,), generator=generator).tolist()
        sequences.append([torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths])
    return sequences


def micro_batch(sequence: list[Tensor]) -> MicroBatch:
    labels = [torch.cat([document[1:], torch.tensor([-100])]) for document in sequence]
    edges = [0]
    for document in sequence:
        edges.append(edges[-1] + len(document))
    return MicroBatch(
        torch.cat(sequence), torch.cat(labels), torch.cat([torch.arange(len(d)) for d in sequence]), tuple(edges)
    )


def rated_answers(sequence: list[Tensor]) -> RatedAnswers:
    """Answers whose reference and divergence nearly cancel: in bf16, the reference would be off by up to 16."""
    numbers = torch.arange(len(sequence)).repeat_interleave(torch.tensor([len(document) for document in sequence]))
    tokens = (micro_batch(sequence).labels != -100).nonzero().flatten()
    lengths = torch.tensor([[len(document) - 1.0] for document in sequence])
    desirable = torch.arange(len(sequence)) % 2 == 0
    reference = -4100.33 - 4.2 * lengths
    objective = Objective("kto", 0.3, desirable_weight=1.37)
    return RatedAnswers(tokens, objective, numbers[tokens], lengths, reference, desirable=desirable, divergence=4100.0)


def predicted(sequences: list[list[Tensor]]) -> int:
    return sum(len(document) - 1 for sequence in sequences for document in sequence)
