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
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_DISABLED = "DISABLE_KUBEFLOW_INTEGRATION"
_INTERVAL_S = 5.0
_TIMEOUT_S = 5.0


class KubeflowStatus:
    """Posts progress, remaining time and the newest value of each metric, at most every five seconds."""

    def __init__(
        self, environ: Mapping[str, str], total_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._ca_cert, self._token = environ[URL], environ.get(CA_CERT), environ.get(TOKEN)
        self._total_steps = total_steps
        self._clock = clock
        self._posted_at = -_INTERVAL_S
        self._metrics: dict[str, float] = {}
        self._step = 0
        self._next: dict[str, Any] | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._post_all, name="kubeflow-status", daemon=True)
        self._thread.start()
        self._post_later({"progressPercentage": 0, "metrics": [{"name": "total_steps", "value": str(total_steps)}]})

    def ends_at(self, step: int) -> None:
        """Set the last step of a run that stops early."""
        self._total_steps = step

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Post `metrics`, which contain "step" and, for a training step, "eta_s"."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        self._metrics |= {name: value for name, value in numbers.items() if name not in ("step", "eta_s")}
        self._step = metrics["step"]
        if self._clock() - self._posted_at >= _INTERVAL_S:
            self._posted_at = self._clock()
            # Only `close` reports 100 %.
            percentage = min(99, self._step * 100 // max(1, self._total_steps))
            self._post_later(self._status(percentage, numbers.get("eta_s")))

    def close(self) -> None:
        """Post the end of a complete run, and wait until all posts were sent or failed."""
        if self._step >= self._total_steps:
            self._post_later(self._status(100, 0.0))
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(2 * _TIMEOUT_S)

    def _status(self, percentage: int, eta_s: float | None) -> dict[str, Any]:
        progress = {"current_step": self._step, "total_steps": self._total_steps}
        status: dict[str, Any] = {
            "progressPercentage": percentage,
            "metrics": [{"name": name, "value": str(value)} for name, value in {**self._metrics, **progress}.items()],
        }
        if eta_s is not None:
            status["estimatedRemainingSeconds"] = max(0, int(eta_s))
        return status

    def _post_later(self, status: dict[str, Any]) -> None:
        """Replace the status that the thread will post next, because only the newest status matters."""
        with self._changed:
            self._next = {"lastUpdatedTime": datetime.now(UTC).isoformat(), **status}
            self._changed.notify()

    def _post_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                status, self._next = self._next, None
            if status is None:
                return
            self._post(status)

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
