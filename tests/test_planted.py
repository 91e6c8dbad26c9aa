"""The faults that can be planted: where they say, and as CONTRIBUTING.md tells them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tools.planted import FAULTS, REPOSITORY, Fault, PlantingError, ending_orphans, failing_test, table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_line_stands_once(fault: Fault) -> None:
    text = (REPOSITORY / "src" / "aliquot" / fault.file).read_text()
    assert text.count(fault.line) == 1
    assert fault.planted != fault.line


def test_contributing_has_the_table() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert table() in text, "python -m tests.tools.planted --table prints the new one"


@pytest.mark.parametrize(
    ("text", "test"),
    [
        pytest.param("def test_it() -> None: ...", None, id="passes", marks=pytest.mark.long),
        pytest.param("def test_it() -> None: assert False", "test_file.py::test_it", id="fails"),
        pytest.param(
            "import pytest\n@pytest.fixture\ndef run(): 1 / 0\ndef test_it(run): ...",
            "test_file.py::test_it",
            id="fixture-fails",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_failed_test_notices_a_fault(tmp_path: Path, text: str, test: str | None) -> None:
    (tmp_path / "test_file.py").write_text(text)
    assert failing_test(tmp_path, ("test_file.py",)) == test


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("import not_a_module", id="broken-import", marks=pytest.mark.long),
        pytest.param("", id="no-test"),
        pytest.param(None, id="no-file", marks=pytest.mark.long),
    ],
)
def test_tests_that_cannot_run_are_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "test_file.py").write_text(text)
    with pytest.raises(PlantingError, match="no test failed"):
        failing_test(tmp_path, ("test_file.py",))


def test_what_tests_leave_running_is_ended() -> None:
    with ending_orphans():
        pid = int(subprocess.check_output(["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"]))
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
