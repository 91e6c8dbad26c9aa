from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aliquot.core.errors import DamagedCheckpoint
from aliquot.tensor_io.manifest import MANIFEST, checksum, manifest_bytes, read_manifest, verify
from tests.examples import examples

FILES = {"a.safetensors": bytes(range(200)), "state.json": b"{}", "empty": b""}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    records = {name: checksum(data) for name, data in FILES.items()}
    (tmp_path / MANIFEST).write_bytes(manifest_bytes(records, ["empty"]))
    return tmp_path


def rewrite(directory: Path, change: dict[str, Any]) -> None:
    """A manifest that lies consistently: its own checksum fits."""
    fields = json.loads((directory / MANIFEST).read_text())
    del fields["crc32"]
    fields |= change
    own = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    (directory / MANIFEST).write_text(json.dumps({**fields, "crc32": own}))


def test_verify(directory: Path) -> None:
    manifest = verify(directory)
    assert set(manifest.files) == set(FILES)
    assert manifest.config_files == ["empty"]


@pytest.mark.long
def test_every_bit_of_the_manifest_counts(directory: Path) -> None:
    path = directory / MANIFEST
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 3):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            read_manifest(directory)
        except DamagedCheckpoint:
            continue
        assert json.loads(data) == json.loads(good), f"bit {bit} went unnoticed"


@pytest.mark.parametrize("name", FILES)
def test_missing_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name}: missing"):
        read_manifest(directory)


def test_wrong_size_and_damaged_block(directory: Path) -> None:
    with (directory / "a.safetensors").open("r+b") as file:
        file.write(b"x")
    read_manifest(directory)  # sizes only
    with pytest.raises(DamagedCheckpoint, match=r"a.safetensors: .*byte 0 "):
        verify(directory)
    (directory / "a.safetensors").write_bytes(b"short")
    with pytest.raises(DamagedCheckpoint, match="5 bytes instead of 200"):
        read_manifest(directory)


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../state.json": {"bytes": 2, "crc32": [1]}}},
        {"files": {"/etc/hostname": {"bytes": 2, "crc32": [1]}}},
        {"files": {"": {"bytes": 0, "crc32": []}}},
        {"files": {"state.json": {"bytes": 2, "crc32": []}}},
        {"files": {"state.json": {"bytes": 2, "crc32": [1, 2]}}},
        {"files": {"state.json": {"bytes": True, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": -1, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2**80, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2.0, "crc32": [1]}}},
        {"files": {"state.json": {"bytes": 2, "crc32": [-1]}}},
        {"files": {"state.json": {"bytes": 2, "crc32": "1"}}},
        {"files": {"state.json": 3}},
        {"files": []},
        {"config_files": ["../secret"]},
        {"config_files": ["a", 1]},
        {"version": 2},
        {"format": "other"},
        {"block_bytes": 0},
        {"more": 1},
    ],
)
def test_manifests_that_lie(directory: Path, change: dict[str, Any]) -> None:
    rewrite(directory, change)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify(directory)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_absent_manifest(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json"):
        read_manifest(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text(), st.lists, max_leaves=4).map(lambda v: json.dumps(v).encode())
)
def test_fuzz(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(tmp_path)
