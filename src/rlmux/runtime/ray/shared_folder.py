"""Checks that every Ray node sees the run's folder, before anything is written there that a resume needs.

    controller   writes  .shared-ID            a node  reads it, and writes  .shared-ID-NUMBER
    controller   reads .shared-ID-NUMBER       other content, or none: the node has a folder of its own

A path that exists on both sides proves nothing: a node makes the folders that it lacks. Only content that both sides
read does. A network file system may show a new file late, so both sides retry for some seconds.

A module of its own: tested without a Ray cluster, by nodes that are functions.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmux.core.errors import UserError
from rlmux.core.model import NodeId
from rlmux.runtime.ray.cluster import RayNode

_LATE_S = 5.0
"""Seconds in which a new file becomes visible on every machine of a network file system."""
_POLL_S = 0.05
_ANSWER_LIMIT_S = 60.0

AskNode = Callable[[RayNode, Path, Path], Any]
"""Starts `answer_mark` on a node; returns a reference for `ray.get`."""


def answer_mark(mark: Path, answer: Path) -> str:
    """Copy the mark's content into the answer, on the node that this runs on. Returns the reason of a failure."""
    try:
        content = _content(mark)
        if content is None:
            return f"{mark.parent} there is another folder, or none"
        answer.write_text(content)
    except OSError as error:
        return f"{mark.parent} there: {error.strerror or error}"
    return ""


def ask_node(node: RayNode, mark: Path, answer: Path) -> Any:
    """Start `answer_mark` on the Ray node."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(answer_mark)
    strategy = NodeAffinitySchedulingStrategy(node.ray_id, soft=False)
    return task.options(scheduling_strategy=strategy).remote(mark, answer)


class FolderMark:
    """A file in the run's folder that nodes must find and answer. Removed with its answers by `close`."""

    def __init__(self, folder: Path, ask: AskNode = ask_node) -> None:
        self._folder = folder.absolute()
        self._ask = ask
        self._content = secrets.token_hex(16)
        self._mark = self._folder / f".shared-{self._content[:8]}"
        self._answers: list[Path] = []
        self._mark.write_text(self._content)

    def ask(self, node: RayNode) -> tuple[Any, Path]:
        """(reference of the node's reply, its answer's file)."""
        answer = self._mark.with_name(f"{self._mark.name}-{len(self._answers)}")
        self._answers.append(answer)
        return self._ask(node, self._mark, answer), answer

    def problem(self, reply: str, answer: Path) -> str:
        """Reason why the node does not share the folder, by its reply; empty if it does."""
        if reply:
            return reply
        if _content(answer) != self._content:
            return f"{self._folder} there is another folder"
        return ""

    def close(self) -> None:
        for path in [self._mark, *self._answers]:
            path.unlink(missing_ok=True)


def check_shared(folder: Path, nodes: Mapping[NodeId, RayNode], ask: AskNode = ask_node) -> None:
    """Raises UserError for the first node that does not see the run's folder, or cannot write there."""
    mark = FolderMark(folder, ask)
    try:
        asked = [(node, *mark.ask(node)) for node in {node.ray_id: node for node in nodes.values()}.values()]
        for node, reference, answer in asked:
            if problem := mark.problem(_reply(reference), answer):
                raise UserError(not_shared_line(node, folder, problem))
    finally:
        mark.close()


class Newcomers:
    """The same check of nodes that join during the run, without a wait: a node is taken once it has answered."""

    def __init__(
        self, folder: Path, ask: AskNode = ask_node, is_ready: Callable[[Any], bool] = lambda asked: _ready(asked)
    ) -> None:
        self._folder = folder
        self._ask = ask
        self._is_ready = is_ready
        self._asked: dict[str, tuple[FolderMark, Any, Path]] = {}
        self._is_shared: dict[str, bool] = {}

    def share(self, node: RayNode) -> bool:
        """Whether the node is known to see the run's folder. The first call asks it; one that does not is named on
        stderr, once."""
        if node.ray_id in self._is_shared:
            return self._is_shared[node.ray_id]
        if node.ray_id not in self._asked:
            mark = FolderMark(self._folder, self._ask)
            self._asked[node.ray_id] = (mark, *mark.ask(node))
        mark, reference, answer = self._asked[node.ray_id]
        if not self._is_ready(reference):
            return False
        problem = mark.problem(_reply(reference), answer)
        mark.close()
        self._is_shared[node.ray_id] = not problem
        if problem:
            print(f"rlmux: {not_shared_line(node, self._folder, problem)}; the node is not used", file=sys.stderr)
        return not problem


def _ready(reference: Any) -> bool:
    ready, _ = ray.wait([reference], timeout=0)
    return bool(ready)


def _reply(reference: Any) -> str:
    try:
        return str(ray.get(reference, timeout=_ANSWER_LIMIT_S))
    except ray.exceptions.RayError as error:
        return f"its check failed: {str(error).strip().splitlines()[-1]}"


def not_shared_line(node: RayNode, folder: Path, problem: str) -> str:
    return (
        f"Ray node {node.address} does not share --out {folder}: {problem}; accepted: a folder that every node of the "
        "cluster mounts at this path and may write to, such as one on NFS"
    )


def _content(path: Path) -> str | None:
    """Text of the file, once it is visible; None if it stays absent."""
    until_s = time.monotonic() + _LATE_S
    while True:
        try:
            return path.read_text()
        except FileNotFoundError:
            if time.monotonic() > until_s:
                return None
        time.sleep(_POLL_S)
