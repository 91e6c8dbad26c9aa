"""Which interface leads where."""

from __future__ import annotations

from aliquot.launch.gloo_interface import interface_towards


def test_interface_towards_oneself() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None
