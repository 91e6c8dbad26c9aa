"""Write the security settings of a job's pods: security contexts, and a NetworkPolicy for incoming connections."""

from __future__ import annotations

from aliquot.cluster.job import Job
from aliquot.cluster.manifests import Document
from aliquot.cluster.pod import USER, pod_labels


def pod_security() -> Document:
    return {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Document:
    return {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def network_policy(job: Job, any_job: bool = False) -> Document:
    """Write a NetworkPolicy that restricts incoming connections to the job's pods.

    Other pods are blocked because gloo and NCCL do not authenticate peers. The pods of the job reach all ports of each
    other, because gloo and NCCL choose ports at run time. The Prometheus port is open to every pod and node, because
    the address of the Prometheus server is unknown. Outgoing connections (DNS, the hub, S3) are not restricted.

    With `any_job`, the policy applies to all jobs of the same runtime in the namespace, and not only to `job`.
    """
    pods = {"podSelector": {"matchLabels": pod_labels(job, any_job)}}
    ingress: list[Document] = [{"from": [pods]}]
    if (port := job.config.observe.prometheus) is not None:
        ingress.append({"ports": [{"protocol": "TCP", "port": port}]})
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return job.manifest("networking.k8s.io/v1", "NetworkPolicy", spec=spec)
