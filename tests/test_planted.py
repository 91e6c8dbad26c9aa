"""The faults that can be planted: where they say, and as CONTRIBUTING.md tells them."""

from __future__ import annotations

import pytest

from tests.tools.planted import FAULTS, REPOSITORY, Fault, table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_stands_once(fault: Fault) -> None:
    text = (REPOSITORY / "src" / "aliquot" / fault.file).read_text()
    assert text.count(fault.line) == 1
    assert fault.planted != fault.line


def test_contributing_has_the_table() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert table() in text, "python -m tests.tools.planted --table prints the new one"
