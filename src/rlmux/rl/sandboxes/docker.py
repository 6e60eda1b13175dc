"""Kind "docker": a container of the task's image, by the command `docker` alone.

    docker build   once a machine: the tag is a hash of environment/, and a lock file lets one process build
    docker run     -i, held by a pipe as a guard is: the container ends when its input does, so when rlmux is killed
    docker exec    each program, one at a time; `kill -9 -1` ends all but the container's first process
    docker cp      files in and out
    docker rm -f   on close

The container is on the host's network where the task allows internet, or where the first program is given a gateway:
127.0.0.1 is then the host's. **Tested against a stand-in for the command; it has not been run against a daemon.**
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from rlmux.core.errors import PipelineError, UserError
from rlmux.rl.sandboxes.folder import remove
from rlmux.rl.sandboxes.harbor_suite import HarborTask
from rlmux.rl.sandboxes.sandbox import Gateway, RunningProgram, SandboxLimits, start_guarded

_LIMIT_S = 120.0
"""Seconds for a command of Docker's, but for those that build."""
_FIRST_PROCESS = "echo up; exec cat > /dev/null"


class DockerSandbox:
    """A container, made when it is first needed. `root`: a folder for copies of its files."""

    has_own_root = True

    def __init__(self, root: Path, limits: SandboxLimits, task: HarborTask) -> None:
        self._root = root.absolute()
        self._root.mkdir(parents=True)
        self._limits = limits
        self._task = task
        self._name = f"rlmux-{secrets.token_hex(8)}"
        self._container: subprocess.Popen[bytes] | None = None
        self._is_on_host_network = task.allow_internet
        self._programs: list[RunningProgram] = []

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: Path,
        cwd: str | None = None,
        gateway: Gateway | None = None,
    ) -> RunningProgram:
        """As `Sandbox.start`. Ends what the last program left running. Raises PipelineError where a gateway is asked
        for after the container was made without one."""
        if gateway is not None and not self._is_on_host_network:
            if self._container is not None:
                raise PipelineError("sandbox: docker: the container has no network, and a gateway needs it")
            self._is_on_host_network = True
        if self._container is not None:
            self._end_programs()
        self._be_there()
        place = [] if (cwd or self._task.workdir) is None else ["-w", cwd or self._task.workdir or ""]
        variables = [f"-e{name}={value}" for name, value in {**self._task.environment, **env}.items()]
        program = start_guarded(
            ["docker", "exec", *place, *variables, self._name, *argv],
            env=os.environ,  # of the command, which finds its daemon there
            output=output,
            cwd=str(self._root),
            limits=SandboxLimits(file_bytes=self._limits.file_bytes),
            also_kill=self._end_programs,
        )
        self._programs.append(program)
        return program

    def _be_there(self) -> None:
        """Start the container. Raises UserError if its image cannot be built, PipelineError if it does not start."""
        if self._container is not None:
            return
        limits = {
            "memory": self._limits.memory_bytes,
            "pids-limit": self._limits.num_processes,
            "cpus": self._task.cpus,
            "network": "host" if self._is_on_host_network else "none",
        }
        words = [f"--{name}={value}" for name, value in limits.items() if value is not None]
        if self._limits.file_bytes is not None:
            words.append(f"--ulimit=fsize={self._limits.file_bytes}")
        image = image_of(self._task)
        command = ["docker", "run", "-i", "--rm", f"--name={self._name}", *words, "--entrypoint=sh", image]
        log = self._root / "docker.log"
        with open(log, "wb") as into:
            self._container = subprocess.Popen(
                [*command, "-c", _FIRST_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=into
            )
        assert self._container.stdout is not None
        with self._container.stdout as said:
            if said.readline().strip() != b"up":
                raise PipelineError(f"sandbox: docker run: {_last_line(log.read_text(encoding='utf-8'))}")

    def _end_programs(self) -> None:
        _docker("exec", "-u", "0", self._name, "sh", "-c", "kill -9 -1", is_needed=False)

    def put(self, source: Path, inside: str) -> None:
        """As `Sandbox.put`."""
        self._be_there()
        folder = inside if source.is_dir() else str(PurePosixPath(inside).parent)
        _docker("exec", "-u", "0", self._name, "mkdir", "-p", folder)
        _docker("cp", f"{source}/." if source.is_dir() else str(source), f"{self._name}:{inside}")

    def clear(self, inside: str) -> None:
        """As `Sandbox.clear`."""
        self._be_there()
        script = 'rm -rf -- "$0" && mkdir -p -- "$0"'
        _docker("exec", "-u", "0", self._name, "sh", "-c", script, inside)

    def path(self, inside: str) -> Path:
        """A copy of the file or folder as it is now, which may be removed when it is asked for again. Where there is
        none inside, there is none at the path."""
        copy = self._root / "copies" / hashlib.sha256(inside.encode()).hexdigest()[:16]
        if copy.exists():
            remove(copy)
        copy.mkdir(parents=True)
        _docker("cp", f"{self._name}:{inside}", str(copy / "it"), is_needed=False)
        return copy / "it"

    def close(self) -> None:
        """As `Sandbox.close`."""
        for program in self._programs:
            program.kill()
        self._programs.clear()
        if self._container is not None:
            assert self._container.stdin is not None
            self._container.stdin.close()
            _docker("rm", "-f", self._name, is_needed=False)
            self._container.kill()
            self._container.wait()
            self._container = None
        if self._root.exists():
            remove(self._root)


def image_of(task: HarborTask) -> str:
    """The task's image, built if this machine does not have it. Raises UserError, with Docker's last line."""
    if task.docker_image is not None:
        return task.docker_image
    folder = task.folder / "environment"
    if not (folder / "Dockerfile").is_file():
        raise UserError(
            f"{folder / 'Dockerfile'}: no such file; accepted: one, or environment.docker_image in task.toml"
        )
    tag = f"rlmux-{re.sub(r'[^a-z0-9]+', '-', task.name.lower()).strip('-') or 'task'}:{_hash_of(folder)}"
    with open(
        Path(tempfile.gettempdir()) / f"{tag.replace(':', '-')}-{os.getuid()}.lock", "w", encoding="ascii"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _docker("image", "inspect", tag, is_needed=False).returncode != 0:
            built = _docker("build", "-t", tag, str(folder), limit_s=task.build_timeout_s, is_needed=False)
            if built.returncode != 0:
                raise UserError(f"{folder / 'Dockerfile'}: docker build: {_last_line(built.stderr or built.stdout)}")
    return tag


def _hash_of(folder: Path) -> str:
    """Of names, modes and contents."""
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        hashed.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode:o}\0{len(content)}\0".encode() + content)
    return hashed.hexdigest()[:16]


def _docker(*words: str, limit_s: float = _LIMIT_S, is_needed: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command. Raises PipelineError if it takes longer than `limit_s` seconds, or if a needed one fails."""
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, errors="replace", timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise PipelineError(f"sandbox: docker {words[0]}: not done within {limit_s:g} s") from error
    if is_needed and done.returncode != 0:
        raise PipelineError(f"sandbox: docker {words[0]}: {_last_line(done.stderr)}")
    return done


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word of why")


@cache
def unavailable_reason() -> str | None:
    """Why there is no Docker here; None if there is."""
    if shutil.which("docker") is None:
        return "no `docker` on PATH"
    done = _docker("version", is_needed=False)
    return None if done.returncode == 0 else _last_line(done.stderr)
