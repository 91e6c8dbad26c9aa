"""One rank of the engine proofs: trains the named cases on one engine and writes losses, norms and its own parts."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.peers import PeerLost
from aliquot.distributed.collectives.wire import Wire
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines import global_norm
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine
from aliquot.engines.engine_plan import OnDisk
from aliquot.engines.fsdp import fsdp_engine
from aliquot.engines.fsdp.fsdp_engine import FsdpEngine
from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine
from aliquot.engines.host import compute_device, gradient_exchange, host_memory, streamed_layers, weight_publication
from aliquot.engines.host.host_engine import HostEngine
from aliquot.engines.host.shared_weights import WeightShard
from aliquot.machine.device_copies import Fill, Uploads
from aliquot.models import backward_pass, initialize, meta
from aliquot.models.micro_batch import MicroBatch
from aliquot.models.stored_weights import Published, PublishedParts
from aliquot.offload.scratch_file import ScratchFile
from aliquot.optim import adamw, sizes
from aliquot.tensor_io.parts import KINDS, ViewableStore
from aliquot.tensor_io.transfer import read_part
from tests.engines import cases
from tests.engines.cases import EngineSetup
from tests.processes import as_ranks

PIECE_BYTES = host_memory._PIECE_BYTES
ENGINES: dict[str, type[Engine]] = {
    "fsdp": FsdpEngine, "single_gpu": SingleGpuEngine, "host": HostEngine, "deepspeed": DeepspeedEngine,
}  # fmt: skip


def train(setup: EngineSetup, case: cases.Case, rank: int, folder: Path) -> None:
    world_size = setup.ranks
    torch.manual_seed(rank)  # initial weights must not depend on it
    config = AutoConfig.for_model(**{**cases.SMALL, **case.model})
    built = meta.build(config, None, case.adapter, case.freeze)
    spec = EngineSpec(
        precision=case.precision,
        micro_batch_tokens=64,
        fused_loss=built.traits.plain_head,
        packs=built.traits.packs,
        looks_up=built.traits.looks_up,
        dropout=built.dropout,
        gradient_checkpointing=case.checkpointing,
        weight_decay=cases.WEIGHT_DECAY,
        adam_beta1=cases.BETAS[0],
        adam_beta2=cases.BETAS[1],
        adam_epsilon=cases.EPSILON,
        optimizer_states=case.states,
        reduce_dtype=case.reduce_dtype,
        micro_batches=1 if case.once else None,
        compile=case.compile,
        collectives="shared_memory" if setup.shared_memory else "gloo",
        deepspeed=deepspeed_settings(setup, case),
        offload=setup.offload and setup.engine == "fsdp",
        copies_weights=setup.copies,
        copied_layers=setup.copied_layers,
        on_disk=on_disk(setup, case, built.model),
        offload_directory=folder,
        replicates=setup.replicas > 1,
        base="bf16" if case.adapter is None else case.adapter.base,
        compressed=built.compressed,
        exact=built.exact - built.learned,
    )
    # Several blocks and windows of a weight, and a rest.
    sizes.BLOCK = adamw.BLOCK = global_norm.NORM_BLOCK = 192
    compute_device.IN_FLIGHT_BYTES = 9000  # some weights, fewer than a layer
    # Of a mixture several experts in a piece, and several pieces of a weight.
    host_memory._PIECE_BYTES = 4096 if "moe" in case.name else PIECE_BYTES
    if setup.uncompiled:  # as where DeepSpeed finds no way to build its shared-memory op
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    if setup.late:
        come_late(rank)
    if setup.on_disk != "nothing":
        ScratchFile._move = late(ScratchFile._move, rank, 0.02)  # type: ignore[method-assign]
    if setup.copies:
        compute_device.COPY_SLOTS = 2 if "nf4" in case.name else host_memory.COPY_SLOTS  # for three layers
        copy_late(rank)
    if setup.like_gpu:
        pretend_to_pin()
    local_size = world_size // setup.replicas
    node, local_rank = divmod(rank, local_size)
    topology = Topology(rank, world_size, local_rank, local_size, node, setup.replicas, "cpu", 1, ())
    if setup.hosts > 1:
        backward_pass.enable_checkpointing(built.model, case.checkpointing)
        host = f"host {rank * setup.hosts // setup.ranks}"
        engine: Engine = HostEngine(built.model, spec, Hosts.join(rank, 0, gather, host), topology)
    elif setup.numa_nodes > 1:
        engine = HostEngine(built.model, spec, Hosts.join(rank, rank % setup.numa_nodes, gather), topology)
    else:
        engine = ENGINES[setup.engine].build(built.model, spec, topology)
    if built.adapter is not None:  # beside a model, here one as it would be without
        frozen = [(name, shape) for name, shape in built.tensors if name not in built.learned]
        model = [Published(name.replace(".base_layer", ""), shape, name, 0) for name, shape in frozen]
        initialize.initialize(PublishedParts(engine, model), meta.build(config).fills, cases.SEED)
    # Of a rank that has nothing: where each document is a call, ranks of fsdp make equally many.
    nothing = None if built.traits.packs else MicroBatch.empty(cases.DOCUMENTS)
    if case.written_twice and setup.flipped == "nothing":
        for part in engine.parts():
            engine.write(part, part.start, torch.zeros(part.numel))
        engine.ready()
        engine.evaluate(cases.micro_batch(cases.documents(99)[0]))
        dist.barrier()  # no rank may compute while another rank writes
    initialize.initialize(engine, built.fills, cases.SEED)
    for part in engine.parts():
        if part.name in spec.exact:
            engine.write(part, part.start, not_bf16(part.shape)[part.start : part.stop])
    if setup.numa_nodes > 1 and not spec.compressed:  # a compressed weight is read only after `ready`
        fill_again(engine)
    engine.ready()
    for name in spec.exact:
        held = built.model.get_parameter(name)
        torch.testing.assert_close(held, not_bf16(tuple(held.shape)).view(held.shape), rtol=0, atol=0)
    write_parts(engine, folder / f"{case.name}-initial-{rank}.safetensors")
    if case.evaluated_first:
        engine.evaluate(cases.micro_batch(cases.documents(99)[0]) if rank == 0 else nothing)
    on_device = engine._components.device_weights if isinstance(engine, HostEngine) else None
    losses, norms, copied, places = [], [], [0 if on_device is None else on_device.copied_bytes], set()
    for step in range(case.steps):
        documents = case.documents(step, world_size)
        mine = [case.micro_batch(s) for i, s in enumerate(documents) if i % world_size == rank]
        rounds = -(-len(documents) // world_size)
        padded = [*mine, *[nothing] * (rounds - len(mine))]
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(padded):
            result = engine.backward(batch, 1 / cases.predicted(documents), last=i == rounds - 1)
            total += (batch or MicroBatch.empty()).metrics(result)["loss"]
        dist.all_reduce(total)
        losses.append(float(total) / cases.predicted(documents))
        norms.append(engine.step(cases.LEARNING_RATE, cases.MAX_GRAD_NORM))
        copied.append(0 if on_device is None else on_device.copied_bytes)
        if isinstance(engine, FsdpEngine) and setup.replicas == 1:
            gradients = (shard.parameter.grad for shard in engine._trainable)
            places.add(tuple(None if gradient is None else gradient.to_local().data_ptr() for gradient in gradients))
    assert len(places) <= 1, "gradients of engine fsdp stay where they are"
    if isinstance(engine, FsdpEngine) and setup.like_gpu:
        for shard in engine._shards:  # the optimizer updates the pinned memory that FSDP2 copies
            assert not shard.local.numel() or shard.local.is_pinned()
            assert shard.local.data_ptr() == shard.parameter.to_local().data_ptr()  # type: ignore[attr-defined]
    assert (setup.on_disk != "nothing") == (engine.counters().disk_written_bytes > 0)
    write_parts(engine, folder / f"{case.name}-final-{rank}.safetensors")
    if isinstance(engine, FsdpEngine) and setup.replicas > 1:
        check_replicas(engine, local_rank)
    evaluated = engine.evaluate(cases.micro_batch(cases.documents(99)[0]) if rank == 0 else nothing)
    outcome: dict[str, object] = {"losses": losses, "norms": norms, "evaluated": float(evaluated)}
    if isinstance(engine, HostEngine) and "deep" in case.name:
        outcome["generated"] = engine.generate(torch.arange(1, 9)[None], max_new_tokens=5, do_sample=False).tolist()
    (folder / f"{case.name}-{rank}.json").write_text(json.dumps(outcome))
    (folder / f"{case.name}-{rank}-copies.json").write_text(
        json.dumps({"copied": copied, "held": engine.counters().gathered_bytes})
    )
    engine.close()


def copy_late(rank: int) -> None:
    """Copies of weights to the device run in a thread, some of them late; until then their place has NaN."""
    thread, pending = ThreadPoolExecutor(1), list[Future[None]]()

    def copy(copies: Sequence[tuple[Tensor, Fill]]) -> None:
        for target, fill in copies:
            fill(target)

    def begin(_: Uploads, copies: Sequence[tuple[Tensor, Fill]], after: object = None) -> None:
        for target, _fill in copies:
            target.fill_(float("nan"))
        pending.append(thread.submit(late(copy, rank, 0.3), copies))

    def wait(_: Uploads) -> None:
        while pending:
            pending.pop().result()

    Uploads.begin, Uploads.wait_for_copies = begin, wait  # type: ignore[method-assign]


def pretend_to_pin() -> None:
    """Memory that is `pinned` is a copy that this process remembers; FSDP2 offloads to such memory."""
    pinned: dict[int, Tensor] = {}

    def pin_memory(values: Tensor) -> Tensor:
        copy = values.clone()
        pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    Tensor.is_pinned = lambda values: values.untyped_storage().data_ptr() in pinned  # type: ignore[assignment,method-assign]
    fsdp_engine.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy()  # type: ignore[assignment,misc]


def check_replicas(engine: FsdpEngine, local_rank: int) -> None:
    """Ranks with the same place on different nodes hold the same bytes."""
    held = [engine._values(shard.name, kind).flatten().tolist() for shard in engine._trainable for kind in KINDS]
    digests = gather([local_rank, hashlib.sha256(json.dumps(held).encode()).hexdigest()])
    assert len({digest for place, digest in digests if place == local_rank}) == 1


def fill_again(engine: Engine) -> None:
    """As a checkpoint is read: into the part itself, where there is such a place."""
    for part in engine.parts():
        values = read_part(engine, part)
        engine.write(part, part.start, torch.zeros(part.numel))
        place = engine.view(part) if isinstance(engine, ViewableStore) else None
        if place is None:
            engine.write(part, part.start, values)
        else:
            place.copy_(values)


def on_disk(setup: EngineSetup, case: cases.Case, model: torch.nn.Module) -> OnDisk | None:
    """All but vectors, of deep models most layers, too; every second weight of two alike for states alone."""
    matrix_parameters = [weight for weight in model.parameters() if weight.ndim > 1]
    matrices = Counter(tuple(weight.shape) for weight in matrix_parameters if weight.requires_grad)
    frozen = tuple({tuple(weight.shape): None for weight in matrix_parameters if not weight.requires_grad})
    if setup.on_disk == "everything" and setup.hosts == 1 and "deep" in case.name:
        streamed_layers.RESIDENT_LAYERS = 2
        WeightShard.release_pages = spoil  # type: ignore[method-assign]  # weights of this size fill no page
        return OnDisk(tuple(matrices.items()), tuple(matrices.items()), layers=4, frozen=frozen)
    if setup.on_disk == "some states":
        return OnDisk(tuple((shape, (count + 1) // 2) for shape, count in matrices.items()))
    whole = tuple(matrices.items())
    return OnDisk(whole, whole) if setup.on_disk == "everything" else None


def not_bf16(shape: tuple[int, ...]) -> Tensor:
    """Flat fp32 values that would all be rounded to one."""
    return 1 + torch.arange(torch.Size(shape).numel()) * 2.0**-20


def limit_messages(exchange_bytes: int, message_bytes: int, published_numel: int) -> None:
    host_memory.EXCHANGE_BYTES = exchange_bytes
    for module in (host_memory, gradient_exchange, weight_publication):
        module.MESSAGE_BYTES = message_bytes  # type: ignore[attr-defined]
    weight_publication.PUBLISHED_NUMEL = published_numel


def come_late(rank: int) -> None:
    """Ranks of different hosts are apart by random times wherever they meet, and little may be under way."""
    limit_messages(exchange_bytes=3000, message_bytes=500, published_numel=700)

    Wire.send, Wire.receive = late(Wire.send, rank), late(Wire.receive, rank)  # type: ignore[method-assign]


def late(method: Callable[..., Any], rank: int, often: float = 0.1) -> Callable[..., Any]:
    draw = random.Random(rank)

    def wrapped(*arguments: Any) -> Any:
        if draw.random() < often:
            time.sleep(draw.random() * 0.02)
        return method(*arguments)

    return wrapped


def flip_a_bit(rank: int, dtype: torch.dtype) -> None:
    """Of what rank 1 receives: in the third message of `dtype`; uint8 are those about what has changed in weights,
    where the bit is in the first code, float32 are gradients."""
    receive, messages = Wire.receive, count()

    def receive_another(wire: Wire, values: Tensor, host: int) -> Future[None]:
        arrival = receive(wire, values, host)
        if rank != 1 or values.dtype != dtype or next(messages) != 2:
            return arrival
        flipped: Future[None] = Future()

        def flip(_: Future[None]) -> None:
            values.view(torch.uint8)[16].bitwise_xor_(1)
            flipped.set_result(None)

        arrival.add_done_callback(flip)
        return flipped

    Wire.receive = receive_another  # type: ignore[method-assign]


def spoil(shard: WeightShard) -> None:
    for copy in shard.copies:
        copy.fill_(float("nan"))


def deepspeed_settings(setup: EngineSetup, case: cases.Case) -> dict[str, object]:
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "overlap_comm": True}
    zero = {"stage": 3, "sub_group_size": 4000, **(offload if setup.offload else {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": case.precision == "bf16"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def write_parts(engine: Engine, file: Path) -> None:
    parts = {f"{part.kind}/{part.name}/{part.start}": read_part(engine, part) for part in engine.parts()}
    save_file(parts, file)


FLIPPED = {"weights": torch.uint8, "gradients": torch.float32}  # the dtype of such messages


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    argument, *names = arguments
    setup = EngineSetup(**json.loads(argument))
    for name in names:
        if setup.flipped == "nothing":
            train(setup, cases.CASES[name], rank, folder)
            continue
        flip_a_bit(rank, FLIPPED[setup.flipped])
        try:
            train(setup, cases.CASES[name], rank, folder)
        except (SelfTestError, PeerLost, RuntimeError) as error:  # RuntimeError: gloo's, from this worker's own sums
            (folder / f"{name}-{rank}.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    if "deepspeed" in sys.argv[1]:
        importlib.import_module("deepspeed")  # takes seconds: once, not in every rank
    as_ranks(work)
