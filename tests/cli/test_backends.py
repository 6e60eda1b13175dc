"""`--backend` and `--address`: what a person gets where the backend cannot be had. Nothing is made then."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")


def test_an_address_is_for_ray_only(rlmux, folder):
    said = rlmux("run", "small.yaml", "--address", "head:6379")
    assert (said.code, said.err) == (2, "rlmux: --address head:6379: only --backend ray takes one\n")
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


def test_without_ray_the_line_says_how_to_get_it(rlmux, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rlmux.runtime.ray.ray_backend", raising=False)
    said = rlmux("run", "small.yaml", "--backend", "ray")
    assert said.code == 2
    assert said.err == "rlmux: --backend ray: ray is not installed; install it with: pip install 'rlmux[ray]'\n"
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("127.0.0.1:1", "--address 127.0.0.1:1: no Ray cluster answers there (Connection refused); start one with "),
        ("head", "--address head: accepted: HOST:PORT of the cluster's head, "),
        ("ray://head:10001", "--address ray://head:10001: accepted: HOST:PORT of the cluster's head, "),
    ],
)
def test_where_no_cluster_answers_the_line_says_what_to_do(rlmux, folder, address, line):
    pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
    said = rlmux("run", "small.yaml", "--backend", "ray", "--address", address)
    assert said.code == 2
    assert said.err.startswith(f"rlmux: {line}"), said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


@pytest.mark.ray
def test_versions_that_differ_are_one_line(monkeypatch):
    pytest.importorskip("ray", reason="needs the ray extra: pip install 'rlmux[ray]'")
    from rlmux.runtime.ray.cluster import version_line

    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\n"
        "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert version_line(text, "head:6379") == (
        "Ray cluster head:6379: versions differ: The cluster was started with: Ray: 2.50.0 Python: 3.12.1 "
        "This process on node 10.0.0.1 was started with: Ray: 2.60.0 Python: 3.11.7; "
        "install the same Python and Ray on both"
    )
