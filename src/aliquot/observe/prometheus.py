"""Export the numbers of metrics.jsonl to a Prometheus server: `observe.prometheus: PORT`, on rank 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, count
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from aliquot.config.schema import ObserveSection
from aliquot.core.errors import LaunchError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge


class Exporter:
    """Serves http://HOST:PORT/metrics with a gauge `aliquot_<name>` for each number, labelled with the run's name.

    A list with a number per rank (`memory_bytes`) also has the label `rank`. The port opens with `listen`.
    """

    def __init__(self, observe: ObserveSection, run: str) -> None:
        self._port = observe.prometheus
        self._host = observe.prometheus_host
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._names: set[str] = set()
        self._registry: CollectorRegistry | None = None
        self._server: tuple[WSGIServer, Thread] | None = None

    def listen(self) -> None:
        """Open the port, if there is one. Raises UserError if another process uses it."""
        if self._port is None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        try:
            self._server = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise LaunchError(
                f"observe.prometheus: cannot listen on {self._host}:{self._port}: {error.strerror}; choose another"
                " port, or null for none"
            ) from None

    def write(self, metrics: Mapping[str, Any]) -> None:
        if self._registry is None:
            return
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._gauge(name, "run").labels(self._run).set(value)
            elif isinstance(value, list) and all(isinstance(item, int | float) for item in value):
                for rank, item in enumerate(value):
                    self._gauge(name, "run", "rank").labels(self._run, str(rank)).set(item)

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = self._registry = None

    def _gauge(self, name: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        if name not in self._gauges:
            text = f"`{name}` of the last line of metrics.jsonl that has it"
            plain = re.sub(r"\W", "_", f"aliquot_{name}", flags=re.ASCII)  # a source may be called tiny-stories
            numbered = (f"{plain}_{number}" for number in count(2))  # and the next one tiny_stories
            metric = next(candidate for candidate in chain([plain], numbered) if candidate not in self._names)
            self._names.add(metric)
            self._gauges[name] = Gauge(metric, text, labels, registry=self._registry)
        return self._gauges[name]
