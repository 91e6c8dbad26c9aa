"""Estimate what a run loses on many nodes: messages, stragglers, lost nodes and idle ranks.

step_time.py counts operations and bytes, which ranks share. The losses here grow with the number of ranks instead.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from aliquot.engines.host.host_memory import MESSAGE_BYTES
from aliquot.planner.plan import Losses
from aliquot.planner.step_time import StepSetting, StepTime

# CPU time of a rank to send a tiny message to another host and to receive one: gloo's three packets for each, futures,
# checksums. From 16 to 32 ranks of `python benchmarks/scale.py`, 42 messages to one more host took 26 ms on Zen 4.
MESSAGE_S = 0.6e-3
# Latency of a hop from rank to rank. Gloo over TCP: assumed. NCCL between hosts and over NVLink: 14 us plus twice the
# latency of the network, and 3.4 us (protocol Simple in src/graph/tuning.cc of NCCL 2.30).
_TCP_HOP_S, _NCCL_HOP_S, _NVLINK_HOP_S = 60e-6, 20e-6, 3e-6
# Standard deviation of the time of a step of one rank, as a fraction of its mean; assumed.
STEP_SPREAD = 0.02
_PIECE_BYTES = 16 << 20  # the largest message between hosts (distributed/collectives/reduce.py)
NEW_NODE_S = 300.0  # until a new node runs pods after a loss: EC2, node image, pod image; assumed
MONTH_S = 30 * 86400.0
# Failures on demand, as a fraction of the nodes per month: "The Llama 3 Herd of Models" counts 419 unexpected
# interruptions in 54 days on 2,048 nodes.
FAILED_A_MONTH = 0.1
LONGEST_INTERVAL_S = 6 * 3600.0  # more steps are not risked, however rare losses are
SAVING_PART = 0.5  # a save takes at most this part of the time between two saves


def losses(
    step: StepTime, setting: StepSetting, micro_batches: int, wire_bytes: int, save_s: float, idle_ranks: float
) -> Losses:
    """Estimate the losses of a run with `micro_batches` on each rank and optimizer step.

    Args:
        wire_bytes: sent between hosts by all ranks in a step.
        save_s: seconds in which all ranks write a checkpoint, or read one.
        idle_ranks: the fraction of the micro-batches of a step that are empty.
    """
    layout = setting.layout
    if layout.nodes == 1:
        return Losses(idle_ranks=idle_ranks)
    with_messages_s = step.total_with(_messages_s(setting, micro_batches, wire_bytes))
    spread_s = STEP_SPREAD * expected_maximum(layout.world_size) * step.total_s
    lost_a_second = FAILED_A_MONTH / MONTH_S * layout.nodes
    interval_s = best_interval_s(save_s, lost_a_second)
    return Losses(
        messages=1 - step.total_s / with_messages_s,
        stragglers=spread_s / (step.total_s + spread_s),
        lost_nodes=min(1.0, lost_a_second * (NEW_NODE_S + save_s + interval_s / 2)),
        idle_ranks=idle_ranks,
    )


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` standard normal values (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def best_interval_s(save_s: float, lost_a_second: float) -> float:
    """Return the seconds between checkpoints that lose the least time, by Young and Daly, within bounds.

    The interval is sqrt(2 x seconds of a save / losses per second).
    """
    seconds = math.sqrt(2 * save_s / lost_a_second) if lost_a_second else LONGEST_INTERVAL_S
    return max(min(seconds, LONGEST_INTERVAL_S), save_s / SAVING_PART)


def _messages_s(setting: StepSetting, micro_batches: int, wire_bytes: int) -> float:
    """Return the seconds of a step for sending messages between hosts, without the time of their bytes."""
    layout = setting.layout
    if setting.engine == "host":
        # A rank sends gradient sums and updated weights to its counterpart on every other host. Weights share a message
        # until it has MESSAGE_BYTES; large weights are cut into pieces.
        others, ranks = layout.nodes - 1, layout.world_size
        peer_bytes = wire_bytes / ranks / others
        full_messages = (peer_bytes + setting.weights_bytes / ranks) / MESSAGE_BYTES
        return MESSAGE_S * others * (2 + min(full_messages, 2 * setting.weights + peer_bytes / _PIECE_BYTES))
    # The ranks of a replica gather each group twice and reduce it once per micro-batch, but unsharded groups once per
    # step. Each collective passes a ring; gloo reduces in two rounds. Replicas all-reduce each group once per step.
    groups = setting.groups if setting.engine == "fsdp" else setting.weights
    gathers = groups * (1 if setting.unsharded.weights else 2 * micro_batches)
    reduces = groups * (1 if setting.unsharded.gradients else micro_batches)
    nodes, ranks = layout.nodes // setting.replicas, layout.world_size // setting.replicas
    if layout.device == "cpu":
        return ((gathers + 2 * reduces) * (ranks - 1) + 2 * groups * (setting.replicas - 1)) * _TCP_HOP_S
    # The hops are those of NCCL's cost model (ncclTopoTuneModel in tuning.cc): N - 1 in a ring, of which one less than
    # the nodes leave a node, and 2 x log2(N) in the trees of an all-reduce. With one GPU per node, NCCL may gather and
    # reduce in trees, too (PAT), but these have 0.75 of a ring's bandwidth, which large groups of weights need.
    ring_s = (nodes - 1) * _NCCL_HOP_S + (ranks - nodes) * _NVLINK_HOP_S
    return (gathers + reduces) * ring_s + 2 * groups * math.log2(setting.replicas) * _NCCL_HOP_S
