"""The API server as a judge: a server-side apply that changes nothing, by one connection."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

import yaml


class Server:
    """By a kubeconfig with client certificates, as $APISERVER_UP writes it."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        context.load_cert_chain(user["client-certificate"], user["client-key"])
        address = urllib.parse.urlsplit(cluster["server"])
        self._connection = http.client.HTTPSConnection(str(address.hostname), address.port, context=context, timeout=60)
        self._resources: dict[str, dict[str, dict[str, Any]]] = {}

    def refusal(self, document: dict[str, Any]) -> str | None:
        """Why the server does not take `document`; None: it would."""
        api_version = document["apiVersion"]
        resource = self._resources_of(api_version).get(str(document.get("kind")))
        if resource is None:
            return f"no matches for kind {document.get('kind')}"
        space = f"namespaces/{document['metadata'].get('namespace', 'default')}/" if resource["namespaced"] else ""
        path = f"{_root(api_version)}/{space}{resource['name']}/{document['metadata']['name']}"
        query = "dryRun=All&fieldManager=test&fieldValidation=Strict&force=true"
        status, answer = self.request("PATCH", f"{path}?{query}", document, "application/apply-patch+yaml")
        return None if status in (200, 201) else str(answer.get("message"))

    def request(
        self, method: str, path: str, body: Any = None, content: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, {"Content-Type": content})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def _resources_of(self, api_version: str) -> dict[str, dict[str, Any]]:
        if api_version not in self._resources:
            _, answer = self.request("GET", _root(api_version))
            found = answer.get("resources", [])
            self._resources[api_version] = {each["kind"]: each for each in found if "/" not in each["name"]}
        return self._resources[api_version]


def _root(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
