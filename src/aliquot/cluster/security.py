"""Restrict the pods of a job: what their processes may do, and which connections reach the pods."""

from __future__ import annotations

from aliquot.cluster.job import Job
from aliquot.cluster.manifests import Document
from aliquot.cluster.pod import USER, pod_labels


def pod_security() -> Document:
    return {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Document:
    return {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def network_policy(job: Job, any_job: bool = False) -> Document:
    """Restrict incoming connections to the job's pods; outgoing connections (DNS, the hub, S3) are not restricted.

    gloo and NCCL authenticate nobody and choose their ports, so the job's pods reach all ports of each other. The
    Prometheus port is open to every pod and node, because the place of the server is unknown. `any_job`: for all jobs
    of the runtime in this namespace, not only for the job with this name.
    """
    pods = {"podSelector": {"matchLabels": pod_labels(job, any_job)}}
    ingress: list[Document] = [{"from": [pods]}]
    if (port := job.config.observe.prometheus) is not None:
        ingress.append({"ports": [{"protocol": "TCP", "port": port}]})
    spec = {**pods, "policyTypes": ["Ingress"], "ingress": ingress}
    return job.manifest("networking.k8s.io/v1", "NetworkPolicy", spec=spec)
