"""Code and data that come with a submission: a gzipped tar, unpacked once under its hash.

    bytes ─▶ .NAME.tgz ─ sha256 ─▶ each member checked ─▶ .NAME ─ renamed ─▶ bundles/SHA256/

Files and folders only, inside the bundle, within the limits. What a server that was killed left half-made is removed by
the next one.
"""

from __future__ import annotations

import gzip
import hashlib
import secrets
import shutil
import tarfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from rlmux.service.dashboard.parameters import Caller
from rlmux.service.dashboard.router import Address, LongWork, get, post
from rlmux.service.dashboard.schemas.timeline_schemas import Bundle
from rlmux.service.lanes.authorization import check_may_run_code
from rlmux.service.lanes.data_dir import BUNDLES, NO_CODE
from rlmux.service.problems import ProblemError

MAX_BYTES = 512 << 20
MAX_FILES = 20_000
_MAX_NAME_BYTES = 255
"""Bytes of a file's or folder's name: what Linux file systems take."""
_MAX_PATH_BYTES = 1024
"""Bytes of a path within the bundle."""
_MAX_FOLDERS = 64
"""Folders within each other."""
_ADDRESS = "/bundles"


class Bundles:
    """The folder of the bundles, and its addresses."""

    def __init__(self, root: Path) -> None:
        self._folder = root / BUNDLES
        self.no_code = self._folder / NO_CODE
        self._unpacking = LongWork(max_running=2, max_waiting=8)
        for left in self._folder.glob(".*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def addresses(self) -> tuple[Address, ...]:
        return (
            post(_ADDRESS, self.upload, "Keep code and data", scope="submit", takes="application/gzip", others=(201,)),
            get(f"{_ADDRESS}/{{sha256}}", self.known, "Whether a bundle is there", scope="submit"),
        )

    def folder_of(self, sha256: str) -> Path | None:
        """Where the bundle lies; None where there is none."""
        is_hash = len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")
        folder = self._folder / sha256
        return folder if is_hash and folder.is_dir() else None

    def known(self, sha256: str) -> Bundle:
        if self.folder_of(sha256) is None:
            raise ProblemError(404, "no such bundle", accepted=f"POST {_ADDRESS}")
        return Bundle(sha256=sha256)

    async def upload(self, caller: Caller, request: Request, response: Response) -> Bundle:
        check_may_run_code(caller.principal, "a bundle")
        aside = self._folder / f".{secrets.token_hex(8)}"
        packed = aside.with_suffix(".tgz")
        try:
            sha256 = await _write(request.stream(), packed)
            is_new = self.folder_of(sha256) is None
            if is_new:
                await self._unpacking.run(self._unpack, packed, aside, sha256)
        finally:
            packed.unlink(missing_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
        response.status_code = 201 if is_new else 200
        return Bundle(sha256=sha256)

    def _unpack(self, packed: Path, aside: Path, sha256: str) -> None:
        aside.mkdir(mode=0o700)
        try:
            with gzip.open(packed) as stream, tarfile.open(fileobj=cast(IO[bytes], _Bounded(stream)), mode="r|") as tar:
                tar.extractall(aside, members=_checked(tar), filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, OverflowError) as error:
            raise ProblemError(400, f"not a bundle: {error}", where="body", accepted="a gzipped tar") from None
        if self.folder_of(sha256) is None:  # else another request has unpacked the same
            aside.rename(self._folder / sha256)


async def _write(chunks: AsyncIterator[bytes], path: Path) -> str:
    """Write what comes; returns its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        async for chunk in chunks:
            digest.update(chunk)
            await run_in_threadpool(file.write, chunk)
    return digest.hexdigest()


def _checked(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members, each once it is known to be harmless, and that a folder can hold it beside those before it."""
    num_files = num_bytes = 0
    files: set[PurePosixPath] = set()
    folders: set[PurePosixPath] = set()
    for member in tar:
        path = PurePosixPath(member.name)
        num_files, num_bytes = num_files + 1, num_bytes + max(0, member.size)
        if not (member.isreg() or member.isdir()):
            raise ProblemError(400, f"{member.name[:80]!r} is a link or a device", accepted="files and folders")
        if not path.parts or ".." in path.parts or member.name.startswith(("/", "\\")) or "\0" in member.name:
            raise ProblemError(400, f"{member.name[:80]!r} leaves the bundle", accepted="relative paths without ..")
        if num_files > MAX_FILES or num_bytes > MAX_BYTES:
            accepted = f"{MAX_FILES} files, {MAX_BYTES >> 20} MiB in all"
            raise ProblemError(413, "the bundle is too large", where=repr(member.name[:80]), accepted=accepted)
        _check_name(path)
        folders.update(path.parents, [path] if member.isdir() else [])
        files.update([] if member.isdir() else [path])
        if both := files & {path, *path.parents} & folders:
            raise ProblemError(400, f"{str(min(both))[:80]!r} is a file and a folder", accepted="one of the two")
        member.mode, member.mtime = 0o700 if member.isdir() else 0o600, 0  # a time may be one that no disk can hold
        yield member


def _check_name(path: PurePosixPath) -> None:
    """Raises ProblemError for a path that not every disk can hold."""
    try:
        longest = max(len(part.encode()) for part in path.parts)
    except UnicodeEncodeError:
        raise ProblemError(400, f"{str(path)[:80]!r} is not UTF-8", accepted="names in UTF-8") from None
    is_long = longest > _MAX_NAME_BYTES or len(str(path).encode()) > _MAX_PATH_BYTES
    if is_long or len(path.parts) > _MAX_FOLDERS:
        accepted = f"names of {_MAX_NAME_BYTES} bytes, paths of {_MAX_PATH_BYTES}, {_MAX_FOLDERS} folders deep"
        raise ProblemError(400, f"{str(path)[:80]!r} is too long", accepted=accepted)


class _Bounded:
    """A stream that raises an error beyond the largest bundle, whatever its headers claim."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MAX_BYTES + MAX_FILES * 2 * tarfile.BLOCKSIZE

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ProblemError(413, "the bundle is too large", where="body", accepted=f"{MAX_BYTES >> 20} MiB in all")
        return data
