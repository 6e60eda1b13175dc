"""The service that `rlmux serve` without a file keeps for this user, and how this user's commands find it.

$XDG_STATE_HOME/rlmux/service.yaml    its lanes, written at the first start
                      service/        its folder: lanes, tokens, its server's address
"""

from __future__ import annotations

import os
from pathlib import Path

from rlmux.core.errors import UserError
from rlmux.log.folder_lock import living_owner
from rlmux.runtime.records.folders import ADDRESS, TOKEN


def own_root() -> Path:
    """The folder; it may not exist yet."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rlmux" / "service"


def own_file() -> Path:
    return own_root().with_suffix(".yaml")


def last_url(root: Path) -> str | None:
    """Address of the newest server of a service's folder; None before its first start."""
    file = root / ADDRESS
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def own_url(accepted: str = "--to DIR|URL") -> str:
    """The address of this user's service. Raises UserError unless it runs. `accepted`: what names another place."""
    root = own_root()
    url = last_url(root)
    if url is None or living_owner(root) is None:
        raise UserError(f"no service of yours runs on this machine; accepted: {accepted}, or start one: rlmux serve")
    return url


def own_token(url: str) -> str | None:
    """The token of this user's service; None where the URL is another server's, or where the service does not run: then
    another user's program may listen there."""
    root = own_root()
    if url != last_url(root) or living_owner(root) is None:
        return None
    return (root / TOKEN).read_text(encoding="utf-8").strip()
