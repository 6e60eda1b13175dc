"""Every node must see the run's folder; here a node is a function that sees a path of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

from rlmux.core.errors import UserError  # noqa: E402
from rlmux.core.model import NodeId  # noqa: E402
from rlmux.runtime.ray import shared_folder  # noqa: E402
from rlmux.runtime.ray.cluster import RayNode  # noqa: E402
from rlmux.runtime.ray.shared_folder import Newcomers, answer_mark, check_shared  # noqa: E402

NODES = {
    NodeId(pool, index): RayNode(node_id=NodeId(pool, index), ray_id=f"ray-{pool}-{index}", address=f"10.0.0.{number}")
    for number, (pool, index) in enumerate([("rollout", 0), ("rollout", 1), ("train", 0)], 1)
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_folder, "_LATE_S", 0.1)
    monkeypatch.setattr(shared_folder, "_reply", lambda reply: reply)
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def nodes_that_see(folder_by_address: dict[str, Path], folder: Path) -> Callable[[RayNode, Path, Path], Any]:
    """Nodes; one in the table has a folder of its own at the path."""

    def ask(node: RayNode, mark: Path, answer: Path) -> str:
        there = folder_by_address.get(node.address, folder)
        return answer_mark(there / mark.name, there / answer.name)

    return ask


def test_a_folder_that_all_nodes_share_is_accepted_and_left_as_it_was(folder):
    check_shared(folder, NODES, nodes_that_see({}, folder))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("exists_there", [True, False])
def test_a_node_with_a_folder_of_its_own_is_one_line_with_its_address(folder, tmp_path, exists_there):
    private = tmp_path / "private"
    if exists_there:
        private.mkdir()
    with pytest.raises(UserError, match=r"^Ray node 10\.0\.0\.3 does not share --out \S+run: [^\n]*accepted: [^\n]*$"):
        check_shared(folder, NODES, nodes_that_see({"10.0.0.3": private}, folder))
    assert list(folder.iterdir()) == []


def test_an_answer_that_does_not_arrive_is_another_folder(folder, tmp_path):
    """As with a copy of the folder that was made while the mark was there."""

    def ask(node: RayNode, mark: Path, answer: Path) -> str:
        return answer_mark(mark, tmp_path / answer.name)

    with pytest.raises(UserError, match="another folder"):
        check_shared(folder, NODES, ask)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_a_node_may_not_write_to_is_refused(folder, tmp_path):
    (folder / "closed").mkdir(mode=0o500)

    def ask(node: RayNode, mark: Path, answer: Path) -> str:
        return answer_mark(mark, folder / "closed" / answer.name)

    with pytest.raises(UserError, match="Permission denied"):
        check_shared(folder, NODES, ask)


def test_a_newcomer_is_taken_once_it_has_answered_and_never_with_a_folder_of_its_own(folder, tmp_path, capsys):
    ready: list[str] = []
    ask = nodes_that_see({"10.0.0.3": tmp_path / "private"}, folder)
    newcomers = Newcomers(folder, ask, is_ready=lambda reply: bool(ready))
    good, bad = NODES[NodeId("rollout", 0)], NODES[NodeId("train", 0)]
    assert not newcomers.share(good)
    ready.append("yes")
    assert newcomers.share(good)
    assert not newcomers.share(bad)
    assert not newcomers.share(bad)
    assert capsys.readouterr().err.count("10.0.0.3 does not share --out") == 1
    assert list(folder.iterdir()) == []
