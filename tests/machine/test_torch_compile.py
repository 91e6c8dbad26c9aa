"""Compiled code is run only from a directory that no other user can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

from aliquot.core.errors import StorageError
from aliquot.machine import torch_compile
from aliquot.machine.cpu import read_cpu
from aliquot.machine.torch_compile import compile_function, set_compile_cache
from tests.tools import warm

SOURCE = Path(__file__).resolve().parents[2] / "src" / "aliquot"
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SHOW = """
from aliquot.cli import main
main.app = lambda: None
main.run()
import os, stat, sys
assert "torch" not in sys.modules
IMPORTS
directory = os.environ["TORCHINDUCTOR_CACHE_DIR"]
print(directory, oct(stat.S_IMODE(os.stat(directory).st_mode)))
"""


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: path.mkdir(mode=0o755), None),
        (lambda path: None, None),
        (lambda path: (path.mkdir(), path.chmod(0o775)), "has mode 0775"),
        (lambda path: (path.mkdir(), path.chmod(0o1777)), "has mode 1777"),
        (lambda path: path.symlink_to(path.parent), "is a link"),
        (lambda path: path.write_text(""), "cannot be made"),
        pytest.param(
            lambda path: (path.mkdir(), os.chown(path, 12345, -1)),
            "belongs to user 12345",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away"),
        ),
    ],
)
def test_cache_writable_by_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare, reason: str | None
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    prepare(tmp_path / "kernels")
    if reason is None:
        compile_function(lambda x: x + 1, backend="eager")
        assert (tmp_path / "kernels").stat().st_mode & 0o022 == 0
    else:
        with pytest.raises(StorageError, match=reason) as error:
            compile_function(lambda x: x + 1)
        assert str(tmp_path / "kernels") in error.value.line


@pytest.mark.parametrize("imports", ["", pytest.param("import torch._dynamo", marks=pytest.mark.long)])
def test_compile_cache_is_set_before_torch_sets_its_default(tmp_path: Path, imports: str) -> None:
    """Importing torch._dynamo sets it, to a directory in /tmp."""
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environ |= {"ALIQUOT_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    shown = warm.run("-c", SHOW.replace("IMPORTS", imports), cold=True, env=environ, cwd=tmp_path)
    assert shown.stdout.split() == [str(tmp_path / "cache" / "inductor"), "0o700"], shown.stderr
    assert not list(tmp_path.glob("torchinductor*"))


def test_default_cache_of_torch_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a program that imports torch first."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path))
    monkeypatch.setenv(VARIABLE, default_cache_dir())
    compile_function(lambda x: x + 1, backend="eager")
    assert os.environ[VARIABLE] == str(tmp_path / "inductor")
    assert stat.S_IMODE((tmp_path / "inductor").stat().st_mode) == 0o700


def test_unwritable_cache_falls_back_to_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALIQUOT_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv(VARIABLE, raising=False)
    set_compile_cache()
    assert f"aliquot-inductor-{os.geteuid()}" in os.environ[VARIABLE]


def test_everything_is_compiled_through_it() -> None:
    assert [file.name for file in SOURCE.rglob("*.py") if "torch.compile(" in file.read_text()] == ["torch_compile.py"]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    torch_compile.inductor_options.cache_clear()
    yield
    torch_compile.inductor_options.cache_clear()


@pytest.mark.parametrize(
    ("model", "isa", "march", "expected"),
    [
        ("Intel(R) Xeon(R) Processor", ("avx512f", "avx2"), None, {"cpp.march": "x86-64-v4"}),
        ("Intel(R) Core(TM) i7", ("avx2",), None, None),
        ("AMD EPYC 9R14", ("avx512f", "avx2"), None, None),
        ("Intel(R) Xeon(R) Processor", ("avx512f", "avx2"), "native", None),  # somebody has chosen
    ],
)
def test_long_vectors_on_intel(
    monkeypatch: pytest.MonkeyPatch, model: str, isa: tuple[str, ...], march: str | None, expected: Any
) -> None:
    monkeypatch.setattr(torch_compile, "read_cpu", lambda: replace(read_cpu(), model=model, isa=isa))
    with config.patch({"cpp.march": march}):
        assert torch_compile.inductor_options() == expected


def test_torch_accepts_inductor_options() -> None:
    torch.compile(lambda x: x + 1, options=torch_compile.inductor_options() or {"cpp.march": "x86-64-v3"})
