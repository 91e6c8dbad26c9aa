"""Report the progress of a run to the status of its TrainJob, by the protocol of transformers' KubeflowCallback.

With the feature gate TrainJobRuntimeStatus, the controller of Kubeflow Trainer sets three environment variables of a
pod: a URL, the path of its CA certificate, and the path of a token. A thread posts the status, and drops failed posts.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_DISABLED = "DISABLE_KUBEFLOW_INTEGRATION"
_INTERVAL_S = 5.0
_TIMEOUT_S = 5.0


class KubeflowStatus:
    """Posts progress, remaining time and the newest value of each metric every five seconds, and at the end."""

    def __init__(self, environ: Mapping[str, str], total_steps: int) -> None:
        self._url, self._ca_cert, self._token = environ[URL], environ.get(CA_CERT), environ.get(TOKEN)
        self.total_steps = total_steps  # less if the run stops early
        self._newest: dict[str, float] = {"step": 0}
        self._updated = datetime.now(UTC)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._post_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Take over `metrics`, which contain "step" and, for a training step, "eta_s"."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._newest = {**self._newest, **numbers}  # a new mapping, because the thread may be reading the old one
        self._updated = datetime.now(UTC)

    def close(self) -> None:
        """Post the last status, and wait until all posts were sent or failed."""
        self._over.set()
        self._thread.join(2 * _TIMEOUT_S)

    def _post_all(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._over.is_set()
            self._post(self._status(is_last))
            self._over.wait(_INTERVAL_S)

    def _status(self, is_last: bool) -> dict[str, Any]:
        metrics = dict(self._newest)
        step, eta_s = metrics.pop("step"), metrics.pop("eta_s", None)
        progress = {"current_step": step, "total_steps": self.total_steps}
        # Only the last status of a complete run reports 100 %.
        is_complete = is_last and step >= self.total_steps
        status: dict[str, Any] = {
            "lastUpdatedTime": self._updated.isoformat(),
            "progressPercentage": 100 if is_complete else int(min(99, step * 100 // max(1, self.total_steps))),
            "metrics": [{"name": name, "value": str(value)} for name, value in {**metrics, **progress}.items()],
        }
        if is_complete or eta_s is not None:
            status["estimatedRemainingSeconds"] = 0 if is_complete else max(0, int(eta_s or 0))
        return status

    def _post(self, status: dict[str, Any]) -> None:
        try:
            # Read the token for each post, because the kubelet renews the token.
            token = Path(self._token or "").read_text(encoding="utf-8").strip()
            context = ssl.create_default_context(cafile=self._ca_cert) if self._ca_cert else None
            request = urllib.request.Request(
                self._url,
                data=json.dumps({"trainerStatus": status}).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                method="POST",
            )
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):
                pass
        # A missing endpoint or token, or a refused connection, must not end the run.
        except (OSError, ValueError, http.client.HTTPException):
            pass


def kubeflow_status(total_steps: int, environ: Mapping[str, str] = os.environ) -> KubeflowStatus | None:
    """Return a reporter, or None if the controller did not ask for reports or the user disabled the integration."""
    disabled = environ.get(_DISABLED, "").lower() in ("true", "1", "yes")
    return KubeflowStatus(environ, total_steps) if environ.get(URL) and not disabled else None
