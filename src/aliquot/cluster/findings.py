"""The rules of `cluster check` with their reasons, its findings, and the tables of checks and fields that find them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from aliquot.cluster.manifests import dig, listed

Level = Literal["error", "warning"]
_ALL = "*"


@dataclass(frozen=True)
class Rule:
    level: Level
    reason: str


RULES: dict[str, Rule] = {
    # manifests
    "unknown-field": Rule("error", "the API server refuses or drops the field, so it has no effect"),
    "malformed": Rule("error", "the API server refuses a value of the wrong type, and other rules cannot check it"),
    "missing-field": Rule("error", "the API server refuses an object without the required fields of its kind"),
    "field-value": Rule("error", "the API server refuses a value that the field's schema does not allow"),
    "cel-rule": Rule("error", "the object violates a CEL rule of its kind, which the API server evaluates"),
    "unknown-kind": Rule("error", "the API server refuses an object of a kind that does not exist"),
    "not-judged": Rule("warning", "a rule that could not be evaluated may be violated"),
    "not-read": Rule("warning", "this kind is not checked"),
    # nodes
    "label-value": Rule("error", "Karpenter detects the error at run time and ignores the whole NodePool"),
    "instance-type": Rule("error", "EC2 has no such type, so no node meets the requirement"),
    "no-type-left": Rule("error", "no EC2 type meets all requirements: the pool never makes a node"),
    "unequal-nodes": Rule("warning", "the ranks of a job wait for the slowest node, and a pod must fit the smallest"),
    "not-sold": Rule("error", "EC2 does not sell these types in this way or region: the pool never makes a node"),
    "no-amx": Rule("warning", "without AMX a bf16 matmul is many times slower"),
    "node-class": Rule("warning", "the NodePool refers to an EC2NodeClass that is not among the manifests"),
    "node-image-kind": Rule(
        "error", "GPU nodes need an image that can use their GPUs, and CPU nodes one without GPU drivers"
    ),
    "node-image-eks": Rule("error", "an image without the EKS bootstrap never joins the cluster"),
    "node-image-drift": Rule("warning", "the image changes under the pool, and Karpenter replaces nodes as drifted"),
    "user-data-packages": Rule("warning", "packages on a node are not available in containers"),
    "discontinued": Rule("warning", "the package is no longer maintained, or is part of PyTorch"),
    "node-role": Rule("error", "Karpenter makes an instance profile of a role by its name"),
    "idle-nodes": Rule("warning", "nodes without pods cost money until somebody deletes them"),
    "node-expiry": Rule("warning", "Karpenter replaces a node at that age even while a job runs on it"),
    "consolidation": Rule("warning", "Karpenter may move pods to save money, and a moved rank ends the run"),
    "spot": Rule("warning", "a reclaimed node costs everything since the last checkpoint"),
    "reservation": Rule("error", "Karpenter takes only the capacity reservations that the node class selects"),
    "volume-size": Rule("warning", "the image does not fit on the disk, so the kubelet evicts the pods"),
    "gpu-label": Rule("warning", "the daemonset of NVIDIA's device plugin runs on labelled nodes only"),
    "region": Rule(
        "error", "nodes reach volumes of their own region and zone, and images of another region cost transfer"
    ),
    # job and nodes together
    "node-selector": Rule("error", "no NodePool makes nodes with the labels that the pods select"),
    "taint": Rule("error", "the pods do not tolerate the taints of the nodes that were made for them"),
    "request-too-large": Rule(
        "error", "a pod stays Pending while no node can hold it beside daemonsets, kubelet and system"
    ),
    "pool-limit": Rule("error", "the NodePool may not make as many nodes as the job has"),
    "zone-spread": Rule("warning", "traffic between zones is slow and costs money"),
    "efa": Rule("error", "a pod that asks for more EFA interfaces than a node has never schedules"),
    "efa-unused": Rule("warning", "NCCL falls back to TCP over the same network"),
    "locked-memory": Rule("warning", "EFA registers memory, and the kernel refuses pods of the default limit, 8 MiB"),
    # job
    "processes": Rule(
        "error", "every node runs the planned processes: `auto`, and other numbers, have other memory and batches"
    ),
    "threads": Rule("error", "more threads than CPUs delay each other"),
    "name-too-long": Rule("error", "JobSet's webhook refuses a job whose pods' names would have more than 63 letters"),
    "no-trainer": Rule(
        "error", "without spec.trainer and mlPolicy.torch nobody sets the PET_* variables: every node trains alone"
    ),
    "container-name": Rule(
        "error", "Trainer knows only the container `node` of the one job that has the trainer's label"
    ),
    "node-env": Rule("error", "the webhook refuses variables of the container `node` outside spec.trainer.env"),
    "reserved-env": Rule("error", "the controller sets these itself, and the webhook refuses them"),
    "runtime": Rule("warning", "the runtime that the TrainJob refers to is not among the manifests"),
    "reference": Rule("error", "a pod that names what is not there, or not in its namespace, never starts"),
    "memory-limit": Rule("error", "the plan needs more than the pod may have: it is killed for memory"),
    "requests-and-limits": Rule("warning", "a pod with unequal requests and limits is evicted and throttled first"),
    "resource-amount": Rule("error", "Kubernetes refuses such a pod, or kills it at once"),
    "image-tag": Rule("warning", "a pod that starts later, or again, may run another image under the same name"),
    "suspended": Rule("warning", "a suspended job has no pods until somebody resumes it"),
    "deadline": Rule("warning", "Kubernetes ends a job at its deadline, whether it has finished or not"),
    "gpu-unused": Rule("warning", "GPU nodes cost many times more than CPU nodes"),
    "shm": Rule(
        "error", "a container's own /dev/shm is 64 MiB; DeepSpeed and NCCL end without a message if they need more"
    ),
    "scratch": Rule(
        "error", "the root file system of the trainer is read-only, and what it writes must fit its volumes"
    ),
    "rendered-field": Rule("warning", "the pods get other nodes, networks or files than the config says"),
    "environment": Rule("warning", "the trainer takes its directories, network and keys from these variables"),
    "shm-limit": Rule("error", "/dev/shm in memory counts against the pod's limit"),
    "grace": Rule("error", "the kubelet kills before the checkpoint is written"),
    "signals": Rule("error", "a pod that does not get SIGTERM saves nothing, and exit codes decide about a restart"),
    "name-resolution": Rule("error", "all ranks look rank 0 up by its name: without the name they never meet"),
    "failure-rules": Rule(
        "error", "exit codes lose their meaning: bad input restarts for ever, or a stop fails the job"
    ),
    "ended-job": Rule("error", "an ended job is deleted, and its controller may start it again"),
    "fabric": Rule("error", "the ranks do not reach each other, or not over the network that the plan counts on"),
    "drift": Rule("warning", "Karpenter replaces nodes under running ranks once their NodePool or image has changed"),
    "do-not-disrupt": Rule("warning", "Karpenter does not evict such pods: at a spot notice they are not told to save"),
    "restart-policy": Rule(
        "error", "the API server refuses a Job with podFailurePolicy whose pods restart by themselves"
    ),
    "restarts": Rule("warning", "a lost node ends the job, although it could go on from its checkpoint"),
    "gang-scheduling": Rule("error", "a PodGroup has no effect on pods of the default scheduler"),
    "image-kind": Rule("error", "a CUDA image on CPU nodes is gigabytes for nothing; a CPU image leaves GPUs idle"),
    "image-packages": Rule("error", "the pods end with exit code 2 at the first package that their image lacks"),
    "architecture": Rule("error", "a container runs only on the architecture that its image was built for"),
    "pod-security": Rule(
        "warning",
        "the pod may do more to its node than training needs, and a namespace that enforces `restricted` refuses it",
    ),
    "secret-value": Rule("error", "whoever may read the manifest has the token"),
    # config
    "resume": Rule("error", "a restarted job refuses a run directory that exists"),
    "not-shared": Rule("error", "only files on the shared file system outlive a pod and are visible to all pods"),
    "credentials": Rule(
        "warning", "nothing gives the pods the identity or key that a service asks for, and it refuses them"
    ),
    "no-checkpoints": Rule("error", "a lost node costs the whole run"),
    "plan": Rule("warning", "the plan of the run says so, and nodes cost money while it is true"),
    "planned-config": Rule("error", "the pods, and all numbers of the plan, are those of another config"),
    "not-applied": Rule("warning", "a job needs all of its objects: nodes, directories, protection from other pods"),
    "config-file": Rule("error", "the pods end with exit code 2 if they do not find a valid config"),
    # storage
    "network-policy": Rule("error", "without a rule that allows them, the ranks of the job never meet"),
    "storage-address": Rule("error", "the driver mounts DNSNAME:/MOUNTNAME as the volume names them"),
    "storage-parameters": Rule(
        "error", "the driver ignores unknown names, FSx refuses values that it does not offer, nodes need a new Lustre"
    ),
    "storage-subnet": Rule("error", "FSx creates a file system in one subnet, behind security groups"),
    "storage-safety": Rule("warning", "checkpoints are lost with the only file system that holds them"),
    "storage-access": Rule("error", "several nodes can only mount a ReadWriteMany volume"),
    "storage-binding": Rule("error", "claim and volume do not find each other"),
    "storage-lock": Rule("warning", "without flock nothing keeps a second run out of the run directory"),
    "storage-size": Rule("warning", "FSx for Lustre comes in multiples of 1200 GiB"),
    "storage-speed": Rule("warning", "training waits for the file system when a save is due before the last one ended"),
    # the account and the cluster, asked only with --live
    "security-group": Rule("error", "gloo, NCCL and EFA need all traffic, Lustre TCP 988, among the nodes"),
    "addresses": Rule("warning", "nodes and pods take addresses of the subnet, and start only if some are left"),
    "vcpu-quota": Rule("error", "EC2 starts no node beyond the account's quota of running vCPUs"),
    "aws-resource": Rule("error", "nodes or pods that need it never start"),
    "image-pull": Rule("warning", "the NAT gateway costs money for every byte, and all nodes pull at the same time"),
    "queue": Rule("error", "Kueue keeps a job suspended until its queues exist, and admit all of its pods at once"),
    "priority-class": Rule("error", "a pod whose PriorityClass is missing is never created"),
    "service-account": Rule("error", "a pod whose service account is missing is never created"),
    "subnet": Rule("error", "Karpenter needs a subnet of the zone with the discovery tag"),
    "secret": Rule("error", "a pod whose Secret is missing never starts"),
    "operator": Rule("error", "a manifest of a kind that is not installed is refused"),
    "versions": Rule("error", "these versions are not made for each other"),
    "refused-by-server": Rule("error", "the API server would refuse the object"),
    "quota": Rule("error", "the namespace's quota is smaller than the job"),
    "permission": Rule("warning", "the query had no answer, so this was not checked"),
}


@dataclass(frozen=True)
class RuleFinding:
    """A violation of a rule, with its place and a suggested fix."""

    rule: str  # key in RULES
    where: str  # `file:line kind/name` of an object, or a key of the config
    message: str
    fix: str
    level: Level

    def as_json(self) -> dict[str, str]:
        return {**asdict(self), "reason": RULES[self.rule].reason}


def finding(rule: str, where: object, message: str, fix: str, level: Level | None = None) -> RuleFinding:
    """Make a finding; `level` overrides the level in RULES."""
    return RuleFinding(rule, str(where), message, fix, level or RULES[rule].level)


class Check(NamedTuple):
    """A row in a table of checks of one object: if `fails` is true, the object violates the rule."""

    fails: object
    rule: str  # key in RULES
    message: str
    fix: str
    level: Level | None = None  # None: the level in RULES


def failures(where: object, *checks: Check) -> Iterator[RuleFinding]:
    """Yield a finding for each check that fails."""
    return (finding(check.rule, where, *check[2:]) for check in checks if check.fails)


def did_you_mean(word: object, known: Iterable[str], otherwise: str, similarity: float = 0.6) -> str:
    """Return the suggestion "did you mean X?" with the word in `known` most similar to `word`, else `otherwise`."""
    near = difflib.get_close_matches(str(word), list(known), 1, similarity)
    return f"did you mean {near[0]}?" if near else otherwise


@dataclass(frozen=True)
class Field:
    """A field that can break a run."""

    path: str  # keys joined by `/`; `*` stands for all items of a list, and an empty path for the whole object
    rule: str  # key in RULES
    is_safe: Callable[[Any], object]  # gets None if the field is missing and Kubernetes has no default
    fix: str | Callable[[Any], str]
    message: str = ""  # with {path} and {value}; by default both
    absent: Any = None  # the value that a missing field has for its controller
    level: Level | None = None

    def judge(self, document: Any, where: object) -> Iterator[RuleFinding]:
        """Yield a finding for each value that is not safe."""
        keys = self.path.split("/") if self.path else []
        for path, value in values(document, keys):
            effective = self.absent if value is None else value
            if self.is_safe(effective):
                continue
            shown = (
                f"{value!r}"
                if value is not None
                else "missing"
                if self.absent is None
                else f"not set, so {self.absent}"
            )
            message = self.message or "{path} is {value}"
            yield finding(
                self.rule,
                where,
                message.format(path=path, value=shown),
                self.fix if isinstance(self.fix, str) else self.fix(effective),
                self.level,
            )


def judge_fields(fields: Sequence[Field], document: Any, where: object) -> Iterator[RuleFinding]:
    for field in fields:
        yield from field.judge(document, where)


def values(document: Any, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each field that `keys` select; the value of a missing field is None."""
    if _ALL not in keys:
        yield ".".join(keys), dig(document, *keys)
        return
    at = keys.index(_ALL)
    for index, item in enumerate(listed(dig(document, *keys[:at]))):
        for path, value in values(item, keys[at + 1 :]):
            yield f"{'.'.join(keys[:at])}[{index}]{'.' if path else ''}{path}", value


def one_of(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def none_of(*forbidden: object) -> Callable[[Any], bool]:
    return lambda value: value not in forbidden


def like(pattern: str) -> Callable[[Any], bool]:
    """Accept a missing value, and text that matches the whole `pattern`."""
    return lambda value: value is None or re.fullmatch(pattern, str(value), re.DOTALL) is not None


def unlike(pattern: str) -> Callable[[Any], bool]:
    """Accept text in which `pattern` occurs nowhere."""
    return lambda value: re.search(pattern, str(value or ""), re.MULTILINE) is None


def holds(*words: str) -> Callable[[Any], bool]:
    """Accept a list that has all of `words`."""
    return lambda value: set(words) <= set(map(str, listed(value)))
