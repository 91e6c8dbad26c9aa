"""Files that lie, change or never end: one-line errors, and memory that stays within bounds."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from aliquot.core.errors import DamagedCheckpoint, UserError
from aliquot.machine.memory import memory_use, peak_rss, reset_peak_rss
from aliquot.tensor_io.bytemap import ByteMap
from aliquot.tensor_io.header import read_header
from aliquot.tensor_io.manifest import MANIFEST, checksum, manifest_bytes, read_manifest, verify
from aliquot.tensor_io.parts import Part
from aliquot.tensor_io.transfer import Progress, drain, fill
from tests.examples import examples
from tests.tensor_io.world import FakeStore, MemoryStore, layout_of, run_world


@pytest.mark.long
def test_a_header_of_very_many_entries(tmp_path: Path) -> None:
    count = 200_000
    fields = (b'"t%06d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}' % (i, i, i + 1) for i in range(count))
    text = b"{" + b",".join(fields) + b"}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(count))

    def read(ranks: Any) -> tuple[int, int]:
        if not reset_peak_rss():
            pytest.skip("the kernel does not reset the peak")
        before = memory_use().rss_bytes
        return len(read_header(path).entries), peak_rss() - before

    ((found, peak),) = run_world(1, read)
    assert found == count
    assert peak < 20 * len(text), "memory grows with the header, by a small factor"


def test_nan_payloads_and_denormals_pass_through(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC0, 0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 0x0001, 0x8000], dtype=torch.uint16)
    save_file({"x": bits.view(torch.bfloat16)}, tmp_path / "model.safetensors")
    entries = ByteMap.from_directory(tmp_path).entries
    store = InMemoryStore([("x", (8,))], torch.bfloat16)
    fill(store, {"weight": entries})
    assert torch.equal(store.named["x"].view(torch.uint16), bits), "not a bit changed where no dtype does"
    as_fp32 = FakeStore([("x", (8,))], kinds=["weight"], zeros=True)
    fill(as_fp32, {"weight": entries})
    (held,) = as_fp32.values.values()
    assert torch.equal(held.isnan(), bits.view(torch.bfloat16).isnan()) and torch.equal(held[4:], store.named["x"][4:])

    wide = torch.tensor([0x7FC00001, 0x7FFFFFFF, -1, 0x00000001], dtype=torch.int32)
    layout = layout_of([("x", (4,))], torch.float32, 1 << 30, "model")
    (tmp_path / "out").mkdir()
    layout.create_files(tmp_path / "out")
    as_fp32 = FakeStore([("x", (4,))], kinds=["weight"])
    as_fp32.values = dict.fromkeys(as_fp32.values, wide.view(torch.float32))
    drain(as_fp32, {"weight": layout.byte_map(tmp_path / "out").entries})
    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-16:] == wide.numpy().tobytes()


class InMemoryStore(MemoryStore):
    """Whole tensors of one dtype that are read and written where they lie."""

    def __init__(self, tensors: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> None:
        parts = FakeStore(tensors, kinds=["weight"]).parts()
        super().__init__({part: torch.zeros(part.numel, dtype=dtype) for part in parts})
        self.named = {part.name: values for part, values in self.values.items()}

    def view(self, part: Part) -> torch.Tensor:
        return self.values[part]

    def read(self, part: Part, start: int, out: torch.Tensor) -> None:
        raise AssertionError("a part that has a view is not copied")

    write = read


@pytest.mark.few(4)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_views_of_any_dtype(tmp_path: Path, held: torch.dtype, stored: torch.dtype) -> None:
    tensors = [("a", (3, 700_001)), ("b", ()), ("c", (0, 2)), ("d", (5,))]  # a: several pieces of an odd size
    original = {name: torch.randn(shape).to(stored) for name, shape in tensors}
    save_file(original, tmp_path / "model.safetensors")
    store = InMemoryStore(tensors, held)
    fill(store, {"weight": ByteMap.from_directory(tmp_path).entries})
    assert all(torch.equal(store.named[n], original[n].flatten().to(held)) for n in original if n != "c")
    layout = layout_of(tensors, stored, 1 << 30, "again")
    layout.create_files(tmp_path)
    drain(store, {"weight": layout.byte_map(tmp_path).entries})
    found = InMemoryStore(tensors, stored)
    fill(found, {"weight": ByteMap.from_directory(tmp_path, "again").entries})
    assert all(torch.equal(found.named[n], store.named[n].to(stored)) for n in original if n != "c")


def test_progress_is_told_and_can_end_a_transfer(tmp_path: Path) -> None:
    tensors = [("a", (6_000_000,)), ("b", (3,))]
    layout = layout_of(tensors, torch.float32, 1 << 30, "model")
    layout.create_files(tmp_path)
    maps = {"weight": layout.byte_map(tmp_path).entries}
    told: list[Progress] = []
    assert drain(FakeStore(tensors, kinds=["weight"]), maps, watch=told.append) == 24_000_012
    assert [one.done_bytes for one in told] == sorted({one.done_bytes for one in told}) and len(told) > 4
    assert told[-1].done_bytes == told[-1].total_bytes == 24_000_012

    class Enough(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise Enough

    before = len(list(Path("/proc/self/fd").iterdir()))
    for move in (fill, drain):
        with pytest.raises(Enough):
            move(FakeStore(tensors, kinds=["weight"]), maps, watch=stop)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "no file stays open"


def test_a_file_that_shrinks_or_grows_under_way(tmp_path: Path) -> None:
    tensors = [("a", (4_000_000,)), ("z", (4_000_000,))]
    layout = layout_of(tensors, torch.float32, 1 << 30, "model")
    layout.create_files(tmp_path)
    maps = {"weight": layout.byte_map(tmp_path).entries}
    path = tmp_path / "model.safetensors"

    def cut(progress: Progress) -> None:
        os.truncate(path, 1000)

    with pytest.raises(UserError, match=r"model\.safetensors: the file became shorter"):
        fill(FakeStore(tensors, kinds=["weight"], zeros=True), maps, watch=cut)
    os.truncate(path, layout.total_bytes + 1)
    with pytest.raises(UserError, match="bytes where its header was read at"):
        fill(FakeStore(tensors, kinds=["weight"], zeros=True), maps)


def signed(fields: dict[str, Any]) -> bytes:
    """A manifest whose own checksum fits, whatever it says."""
    own = zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({**fields, "crc32": own}).encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
records = st.fixed_dictionaries(
    {}, optional={"bytes": st.integers(0, 300) | json_values, "crc32": st.lists(json_values, max_size=2) | json_values}
)
names = st.sampled_from(["a", "..", "/", "a/../a", "manifest.json", "", "\0", "\ud800", "a" * 300]) | st.text(
    max_size=4
)
manifests = st.fixed_dictionaries(
    {"format": st.just("aliquot-checkpoint"), "version": st.just(1), "block_bytes": st.just(16777216)},
    optional={
        "files": st.dictionaries(names, records | json_values, max_size=3) | json_values,
        "config_files": st.lists(names, max_size=2) | json_values,
        "more": json_values,
    },
)


@settings(max_examples=examples(200))
@given(manifests)
def test_fuzz_manifest(fields: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "a").write_bytes(bytes(200))
        try:
            (directory / MANIFEST).write_bytes(signed(fields))
        except UnicodeEncodeError:
            return
        try:
            manifest = verify(directory)
        except DamagedCheckpoint as error:
            assert "\n" not in str(error)
            return
        assert all((directory / name).stat().st_size == record.bytes for name, record in manifest.files.items())


def test_a_name_with_a_newline_stays_in_its_line(tmp_path: Path) -> None:
    fields = {"files": {"\n": {}}, "config_files": [], "format": "aliquot-checkpoint", "version": 1}
    (tmp_path / MANIFEST).write_bytes(signed({**fields, "block_bytes": 16777216}))
    with pytest.raises(DamagedCheckpoint, match="Field required") as told:
        read_manifest(tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("size", [10**12, 2**62])
def test_a_manifest_of_endless_blocks(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(b"")
    record = {"bytes": size, "crc32": [0] * 10}
    fields = {"files": {"a": record}, "config_files": [], "format": "aliquot-checkpoint", "version": 1}
    (tmp_path / MANIFEST).write_bytes(signed({**fields, "block_bytes": 16777216}))
    with pytest.raises(DamagedCheckpoint, match="malformed"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "a"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.name)], ids=["fifo", "link to itself"])
def test_a_checkpoint_with_what_is_no_file(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / MANIFEST).write_bytes(manifest_bytes({"a": checksum(b"12")}, []))
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("link", "directory"), [("model.safetensors", "."), ("model.safetensors.index.json", "."), ("loop", "loop")]
)
def test_links_that_lead_nowhere(tmp_path: Path, link: str, directory: str) -> None:
    (tmp_path / link).symlink_to(link)
    with pytest.raises(UserError):
        ByteMap.from_directory(tmp_path / directory)


def test_index_of_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(UserError, match="a link"):
        ByteMap.from_directory(tmp_path)
