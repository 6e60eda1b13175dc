"""A broker from start to end: the folder, the log, the socket, and the loop that every run has.

    BrokerSpec ──▶ run_broker ──▶ EmbeddedBroker, a backend without workers ──▶ drive: scheduler, controller, log

An existing broker's folder is resumed: its live programs are restored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rlmux.broker.certificate import Tls
from rlmux.broker.embedded import EmbeddedBroker, token_check
from rlmux.broker.server import PermitServer
from rlmux.config.broker_file import BrokerSpec
from rlmux.core.decision.policy import Policy
from rlmux.core.errors import UserError
from rlmux.log.folder_lock import FolderLock
from rlmux.log.notes import ResumedNote
from rlmux.log.run_log import LOG_NAME, LogReader, RunLog, run_header, utc_now
from rlmux.runtime.backend import Submission
from rlmux.runtime.control.inbox import Inbox
from rlmux.runtime.controller import Listener
from rlmux.runtime.local import LocalProcesses
from rlmux.runtime.records.run_folder import prepare_folder
from rlmux.runtime.run import Prepared, RunOptions, RunResult, drive
from rlmux.runtime.worker_backend import WorkerBackend

BACKEND = "permits"
"""What the header of a broker's log names as its backend."""
SOCKET_NAME = "broker.sock"


def run_broker(
    spec: BrokerSpec,
    folder: Path,
    *,
    policy: Policy,
    address: str | None = None,
    token: str = "",
    tls: Tls | None = None,
    listeners: Sequence[Listener] = (),
    on_listening: Callable[[str], None] = lambda address: None,
) -> RunResult:
    """Grant permits until the process is stopped.

    `address`: "unix:PATH", "tcp://HOST:PORT" or, with `tls`, "tls://HOST:PORT"; None for a socket in the folder.
    `on_listening`: receives the address once the broker listens.
    Raises UserError, before anything is created, for an unavailable folder or address.
    """
    address = address or f"unix:{folder / SOCKET_NAME}"
    check_address("--listen", address, token=token, tls=tls)
    if tls is not None and not address.startswith("tls:"):
        raise UserError(f"--tls-cert {tls.cert}: {address} is not encrypted; accepted: --listen tls://HOST:PORT")
    is_there = (folder / LOG_NAME).exists()
    listen = partial(PermitServer, address, tls)
    log, server = _take_up(folder, listen) if is_there else _begin(folder, listen, spec, policy)
    inbox = Inbox()
    permits = EmbeddedBroker(
        spec.cluster,
        inbox,
        server,
        policy=policy.name,
        is_allowed=token_check(token),
        leave_limit_s=spec.leave_limit_s,
        max_hold_s=spec.max_hold_s,
        lease_s=spec.lease_s,
        first_fence=log.last_seq + 1,
    )
    if is_there:
        log.append_note(log.last_time_s, ResumedNote(pipelines=(), retried=(), utc=utc_now()))
        permits.restore(folder)
    permits.start()
    on_listening(server.address)
    with log, contextlib.closing(permits):
        start_s = log.last_time_s if is_there else 0.0
        backend = WorkerBackend(spec.cluster, folder, LocalProcesses({}, None), folder / "weights", start_s=start_s)
        prepared = Prepared(
            cluster=spec.cluster, submissions=[], policy=policy, folder=folder, log=log, backend=backend
        )  # fmt: skip
        options = RunOptions(listeners=[*listeners, permits], parse=_take_no_file, is_kept_open=True, inbox=inbox)
        return drive(prepared, options)


def check_address(option: str, address: str, *, token: str, tls: Tls | None) -> None:
    """Raises UserError for an address that any program could join, and for an encrypted one without a certificate."""
    if address.startswith(("tcp:", "tls:")) and not token:
        raise UserError(f"{option} {address}: needs a token, or any program could join; accepted: RLMUX_TOKEN=... set")
    if address.startswith("tls:") and tls is None:
        raise UserError(f"{option} {address}: needs a certificate; accepted: --tls-cert FILE --tls-key FILE")


def _begin(
    folder: Path, listen: Callable[[], PermitServer], spec: BrokerSpec, policy: Policy
) -> tuple[RunLog, PermitServer]:
    """Create the log and the socket; on failure a folder created for them is removed."""
    was_there = folder.exists()
    lock = prepare_folder(folder, is_overwriting=False)
    try:
        server = listen()
    except UserError:
        lock.release()
        if not was_there:
            shutil.rmtree(folder)
        raise
    header = run_header(policy=policy.name, backend=BACKEND, cluster=spec.cluster, spec={"source": spec.source})
    return RunLog.create(folder, header, lock=lock), server


def _take_up(folder: Path, listen: Callable[[], PermitServer]) -> tuple[RunLog, PermitServer]:
    """Reopen the log and the socket of an ended broker."""
    with LogReader(folder) as log:
        backend = log.header.get("backend")
    if backend != BACKEND:
        raise UserError(f"--out {folder}: it holds a run, not a broker's log; accepted: another folder")
    lock = FolderLock.take(folder)
    try:
        server = listen()
    except UserError:
        lock.release()
        raise
    return RunLog.open(folder, lock=lock), server


def _take_no_file(text: str, source: str) -> Sequence[Submission]:
    raise UserError(
        f"{source}: a broker takes no pipelines; accepted: start the program with {'RLMUX_BROKER'} set "
        "(docs/how-to/your-trainer.md)"
    )


def default_folder(file: str) -> Path:
    """The default folder: one per file, so that a killed broker resumes in it."""
    return Path("runs") / f"broker-{Path(file).stem}"


def environment_token() -> str:
    """The token of this process's environment; empty where there is none."""
    return os.environ.get("RLMUX_TOKEN", "")
