"""The code and data that a file names, packed to be sent with it: equal files make equal bytes, and so an equal hash.

code_folder/rewards.py            ─▶ code/rewards.py
code_folder/tools/ (one is used)  ─▶ code/tools/...            a package goes as a whole
rows.jsonl, anywhere              ─▶ data/HASH-rows.jsonl
a model's folder                      is not sent: its path is one of the server's machine

A module of its own: it packs local files and needs no connection.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlmux.config import Spec
from rlmux.core.errors import UserError
from rlmux.runtime.records.input_files import input_files

MAX_BYTES = 64 << 20
_LEFT_OUT = ("__pycache__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What goes to a server."""

    text: str
    """The file, its paths relative to the bundle."""
    names: tuple[str, ...]
    """Files of the bundle."""
    data: bytes
    """A gzipped tar; empty where the file names no code and no data."""

    @property
    def sha256(self) -> str | None:
        return hashlib.sha256(self.data).hexdigest() if self.data else None


def pack(spec: Spec) -> Packed:
    """The file and its bundle. Raises UserError, with the largest files, where they are too large to send."""
    files = {name: path for path, name in {**_code(spec), **_rows(spec)}.items()}
    plain = yaml.safe_load(spec.resolved)
    for pipeline, given in zip(plain["pipelines"], spec.pipelines, strict=True):
        if given.config.task.path is not None:
            pipeline["task"]["path"] = _row_name(Path(given.config.task.path))
    plain["code_folder"] = "code"
    if not files:
        del plain["code_folder"]
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return Packed(text=text, names=tuple(sorted(files)), data=_tar(files, spec.source) if files else b"")


def _code(spec: Spec) -> dict[Path, str]:
    """Names in the bundle of the modules that rewards and environments come from."""
    found: dict[Path, str] = {}
    for given in spec.pipelines:
        for path in input_files(given.config, spec.code_folder):
            if path.is_relative_to(spec.code_folder) and path.suffix == ".py":
                top = spec.code_folder / path.relative_to(spec.code_folder).parts[0]
                for each in [path] if top == path else sorted(top.rglob("*")):
                    if each.is_file() and not set(each.parts) & set(_LEFT_OUT):
                        found[each] = f"code/{each.relative_to(spec.code_folder).as_posix()}"
    return found


def _rows(spec: Spec) -> dict[Path, str]:
    paths = [Path(given.config.task.path) for given in spec.pipelines if given.config.task.path is not None]
    return {path: _row_name(path) for path in paths}


def _row_name(path: Path) -> str:
    """Files of one name in different folders are two, unless they are equal."""
    with path.open("rb") as file:
        return f"data/{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}-{path.name}"


def _tar(files: Mapping[str, Path], source: str) -> bytes:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > 8 * MAX_BYTES:
        raise _too_large(sizes, source)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w|") as tar:
        folder = tarfile.TarInfo("code")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(folder)
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = sizes[name]
            with files[name].open("rb") as file:
                tar.addfile(member, file)
    if packed.tell() > MAX_BYTES:
        raise _too_large(sizes, source)
    return packed.getvalue()


def _too_large(sizes: Mapping[str, int], source: str) -> UserError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    shown = ", ".join(f"{name} ({sizes[name] / 1e6:.0f} MB)" for name in largest)
    return UserError(
        f"{source}: its code and data are too large to send: {shown}; accepted: {MAX_BYTES >> 20} MiB packed, "
        "or a submission on the server's machine, to the lane's folder"
    )
