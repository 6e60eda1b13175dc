"""Every command names the right one for another command's file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmux.config.broker_file import BrokerConfig, load_broker_spec
from rlmux.config.error_messages import fields_by_key
from rlmux.config.file_kind import BROKER_ALONE, FileKind
from rlmux.config.load import load_spec
from rlmux.config.service_file import ServiceFile, load_service_file
from rlmux.config.tree import RunConfig
from rlmux.core.errors import SpecError

CLUSTER = "cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}\n"
TEXTS = {
    FileKind.PIPELINES: f"{CLUSTER}pipelines: [{{name: a, task: {{name: sort}}}}]\n",
    FileKind.LANES: "lanes: {small: {cluster: {pools: {rollout: {devices: 1}, train: {devices: 1}}}}}\n",
    FileKind.PERMITS: f"{CLUSTER}policy: fifo\n",
    FileKind.SHARES: "shares: {users: {ann: {weight: 2}}}\n",
}
LOADERS: dict[FileKind, Callable[[Path], object]] = {
    FileKind.PIPELINES: load_spec,
    FileKind.LANES: lambda path: load_service_file(path, policies=["rollmux", "fifo"]),
    FileKind.PERMITS: lambda path: load_broker_spec(path, policies=["rollmux", "fifo"]),
}
COMMANDS = {
    FileKind.PIPELINES: "run {}",
    FileKind.LANES: "serve {}",
    FileKind.PERMITS: "broker {}",
    FileKind.SHARES: "usage DIR --set {}",
}


@pytest.mark.parametrize("kind", list(FileKind))
@pytest.mark.parametrize("wanted", list(LOADERS))
def test_another_commands_file_is_one_line_with_that_command(tmp_path, wanted, kind):
    path = tmp_path / "given.yaml"
    path.write_text(TEXTS[kind])
    if kind is wanted:
        LOADERS[wanted](path)
        return
    with pytest.raises(SpecError, match=re.escape(f": rlmux {COMMANDS[kind].format(path)}")) as caught:
        LOADERS[wanted](path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}:1: ")


@pytest.mark.parametrize("wanted", list(LOADERS))
def test_a_trace_is_for_simulate(tmp_path, wanted):
    path = tmp_path / "trace.csv"
    path.write_text("pipeline,submit_s,num_steps,profile\na,0,3,7B_8k\n")
    with pytest.raises(SpecError, match=r"is a trace; [^\n]*: rlmux simulate \S+trace.csv$"):
        LOADERS[wanted](path)


def test_a_key_that_is_misspelt_in_a_file_with_pipelines_is_still_named(tmp_path):
    path = tmp_path / "given.yaml"
    path.write_text(TEXTS[FileKind.PIPELINES] + "lease_s: 3\n")
    with pytest.raises(SpecError, match="lease_s is 3: unknown key"):
        load_spec(path)


def test_the_broker_alone_has_its_keys():
    others = fields_by_key(RunConfig).keys() | fields_by_key(ServiceFile).keys()
    assert fields_by_key(BrokerConfig).keys() - others == BROKER_ALONE
