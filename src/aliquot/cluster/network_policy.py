"""Who may open connections to the pods of a job: its own pods, and whoever collects its metrics."""

from __future__ import annotations

from aliquot.cluster import pod
from aliquot.cluster.job import Job
from aliquot.cluster.manifest_yaml import Document
from aliquot.cluster.nodes import labels


def network_policy(job: Job, any_job: bool = False) -> Document:
    """Connections that the pods open themselves (DNS, the hub, S3, the file system) are not restricted.

    gloo and NCCL authenticate nobody and choose their ports, so the job's pods reach all ports of each other. The
    Prometheus port is open to every pod and node, because nothing here says where the server runs. `any_job`: for all
    jobs of the runtime in this namespace instead of the job with this name.
    """
    pods = {"podSelector": {"matchLabels": pod.pod_labels(job, any_job)}}
    ingress: list[Document] = [{"from": [pods]}]
    if (port := job.config.observe.prometheus) is not None:
        ingress.append({"ports": [{"protocol": "TCP", "port": port}]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name, "namespace": job.section.namespace, "labels": labels(job)},
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }
