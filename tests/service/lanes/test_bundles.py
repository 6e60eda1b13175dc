"""Bundles: what is packed is what is unpacked, and nothing leaves its folder."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import Response

from rlmux.client import bundle
from rlmux.client.bundle import pack
from rlmux.config import Spec, load_spec
from rlmux.core.errors import UserError
from rlmux.service.lanes import bundles
from rlmux.service.lanes.bundles import Bundles
from rlmux.service.problems import ProblemError

FILE = """
cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}
defaults: {task: {name: file, path: rows.jsonl, prompt_key: q, answer_key: a, reward: "tools.score:right"}}
pipelines: [{name: a}]
"""


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    """A file whose reward is in a package that reads a file of its own, beside much that is not sent."""
    folder = tmp_path / "user"
    for name, text in {
        "file.yaml": FILE,
        "rows.jsonl": '{"q": "1", "a": "2"}\n',
        "tools/__init__.py": "",
        "tools/score.py": "from . import table\ndef right(data_source, solution_str, ground_truth): ...",
        "tools/table.py": "",
        "tools/words.txt": "one",
        "tools/__pycache__/score.pyc": "",
        "secret.txt": "",
        "runs/demo/run.db": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_spec(folder / "file.yaml")


@pytest.fixture
def store(tmp_path: Path) -> Bundles:
    (tmp_path / "root" / "bundles" / "none").mkdir(parents=True)
    return Bundles(tmp_path / "root")


def upload(store: Bundles, data: bytes) -> tuple[int, str]:
    """(status, hash)."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    asked, request, response = SimpleNamespace(principal=None), SimpleNamespace(stream=chunks), Response()
    kept = asyncio.run(store.upload(asked, request, response))  # type: ignore[arg-type]
    return response.status_code, kept.sha256


def tar(*members: tuple[str, int], type: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as file:
        for name, size in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = type, size, link
            file.addfile(member, io.BytesIO(bytes(size)))
    return packed.getvalue()


def test_code_and_rows_arrive_and_nothing_else_and_the_file_finds_them(spec, store):
    packed = pack(spec)
    names = [name.partition("-")[2] or name for name in packed.names]
    package = ["__init__.py", "score.py", "table.py", "words.txt"]
    assert names == [*(f"code/tools/{name}" for name in package), "rows.jsonl"]
    assert upload(store, packed.data) == (201, packed.sha256)
    assert upload(store, packed.data) == (200, packed.sha256), "it is known"
    folder = store.folder_of(packed.sha256)
    (folder / "file.yaml").write_text(packed.text)
    again = load_spec(folder / "file.yaml")
    assert again.code_folder == folder / "code"
    assert Path(again.pipelines[0].config.task.path).read_text() == '{"q": "1", "a": "2"}\n'
    here, there = again.pipelines[0].pipeline, spec.pipelines[0].pipeline
    assert here == replace(there, alike=here.alike), "the key of pipelines alike names where the rows lie"


def test_equal_files_make_an_equal_bundle(spec, tmp_path):
    before = pack(spec).sha256
    (tmp_path / "user").rename(tmp_path / "moved")
    assert pack(load_spec(tmp_path / "moved" / "file.yaml")).sha256 == before


def test_what_is_too_large_to_send_is_refused_with_the_largest_files(spec, monkeypatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 10)
    with pytest.raises(UserError, match=r"too large to send: code/tools/score.py \(0 MB\)"):
        pack(spec)


LINK = "is a link or a device"
BAD = {
    "nothing": (b"", 400, "not a bundle"),
    "a zip": (b"PK\x03\x04" * 100, 400, "not a bundle"),
    "no tar": (gzip.compress(b"x" * 3000), 400, "not a bundle"),
    "cut off": (tar(("a.py", 3000))[:-40], 400, "not a bundle"),
    "up": (tar(("../a.py", 1)), 400, "'../a.py' leaves the bundle"),
    "up from within": (tar(("code/../../a.py", 1)), 400, "leaves the bundle"),
    "from the root": (tar(("/etc/a.py", 1)), 400, "'/etc/a.py' leaves the bundle"),
    "a link": (tar(("a", 0), type=tarfile.SYMTYPE, link="/etc"), 400, LINK),
    "a hard link": (tar(("a", 0), type=tarfile.LNKTYPE, link="../../admin.token"), 400, LINK),
    "a device": (tar(("a", 0), type=tarfile.CHRTYPE), 400, LINK),
    "a name that is too long": (tar(("a" * 300, 1)), 400, "is too long"),
    "a path that is too long": (tar((f"{'a' * 200}/" * 9 + "b", 1)), 400, "is too long"),
    "folders that are too deep": (tar(("a/" * 2000 + "b", 1)), 400, "is too long"),
    "a name of other bytes": (tar(("a\udcff", 1)), 400, "'a\\udcff' is not UTF-8"),
    "a file, and a folder": (tar(("a", 1), ("a/b", 1)), 400, "'a' is a file and a folder"),
    "a folder, and a file": (tar(("a/b", 1), ("a", 1)), 400, "'a' is a file and a folder"),
    "a folder as a file": (tar(("a/./b/", 1), ("a/b", 1), ("a//b/c", 1)), 400, "'a/b' is a file and a folder"),
    "too many bytes": (tar(("a", 3000), ("b", 3000)), 413, "the bundle is too large"),
    "too many files": (tar(*((f"{place}", 0) for place in range(12))), 413, "the bundle is too large"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_bundle_is_refused_and_nothing_of_it_is_left(store, tmp_path, monkeypatch, bad):
    data, status, line = BAD[bad]
    monkeypatch.setattr(bundles, "MAX_BYTES", 5000)
    monkeypatch.setattr(bundles, "MAX_FILES", 10)
    with pytest.raises(ProblemError) as refused:
        upload(store, data)
    assert refused.value.status == status
    assert line in str(refused.value)
    assert [path.name for path in (tmp_path / "root" / "bundles").iterdir()] == ["none"]


NAMES = st.text(st.sampled_from("a/.\\\0é\udcff\n~"), max_size=6) | st.sampled_from(["b" * 300, "c/" * 900])
TIMES = st.none() | st.sampled_from(["1e300", "-1e300", "nan", "99999999999999999999", "x"])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE, tarfile.SYMTYPE])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    members=st.lists(st.tuples(NAMES, KINDS, TIMES), max_size=5),
    noise=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3),
)
def test_whatever_is_packed_is_kept_as_a_whole_or_refused(tmp_path_factory, members, noise):
    root = tmp_path_factory.mktemp("root")
    (root / "bundles" / "none").mkdir(parents=True)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name, kind, time in members:
            member = tarfile.TarInfo(name)
            member.type, member.pax_headers = kind, {} if time is None else {"mtime": time}
            file.addfile(member)
    raw = bytearray(data.getvalue())
    for place, byte in noise:
        raw[place % len(raw)] = byte
    kept = ["none"]
    with contextlib.suppress(ProblemError):
        kept.append(upload(Bundles(root), gzip.compress(raw))[1])
    assert sorted(path.name for path in (root / "bundles").iterdir()) == sorted(kept)


@pytest.mark.parametrize("where", ["as it comes", "as it is unpacked"])
def test_of_a_bundle_that_fills_the_disk_nothing_is_left(store, tmp_path, monkeypatch, where):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "as it comes":
        monkeypatch.setattr(bundles, "run_in_threadpool", full)
    else:
        monkeypatch.setattr(tarfile, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        upload(store, tar(("a.py", 3000)))
    assert [path.name for path in (tmp_path / "root" / "bundles").iterdir()] == ["none"]


def test_what_a_killed_server_left_half_unpacked_is_removed_by_the_next(store, tmp_path):
    left = tmp_path / "root" / "bundles" / ".half"
    left.mkdir()
    (left / "a.py").write_text("")
    Bundles(tmp_path / "root")
    assert not left.exists()
