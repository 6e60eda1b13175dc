"""A lane with models: pipelines and Tinker clients share its devices; what clients rely on stays as it was."""

from __future__ import annotations

import pytest
from tests.service.conftest import FILE, LANE
from tests.service.test_lane_apis import program
from tests.small_files import SORT, small_file
from tests.waiting import until

from rlmux.cli.main import run_command_line
from rlmux.config.service_file import load_service_file
from rlmux.core.errors import UserError
from rlmux.policies import POLICIES
from rlmux.report.reports import load_summary
from rlmux.runtime.control.run_status import StatusReader
from rlmux.service.hosted_lane import HostedLane
from rlmux.service.lanes.controllers import LaneController


def test_a_pipeline_and_a_client_share_a_lane_and_an_address_and_each_ends_as_alone(
    serve, connect, tmp_path, monkeypatch
):
    file = tmp_path / "one.yaml"
    file.write_text(small_file(SORT, steps=4))
    assert run_command_line(["run", str(file), "--out", str(tmp_path / "alone"), "--policy", "rollmux"]) == 0
    apart = serve()
    expected = program(connect(apart), "a", apart)
    assert apart.stop() == 0
    served = serve()
    monkeypatch.setenv("RLMUX_TOKEN_FILE", str(served.folder.parent / "admin.token"))
    monkeypatch.delenv("RLMUX_TOKEN", raising=False)
    assert run_command_line(["submit", str(file), "--to", f"http://{served.address}/lanes/{LANE}"]) == 0
    assert program(connect(served), "a", served) == expected
    reader = StatusReader(served.folder)
    until(lambda: reader.read()["pipelines"]["a"]["status"] == "finished", "the end of the pipeline", seen=reader.read)
    reader.close()
    assert served.stop() == 0
    sums = [load_summary(one)["pipelines"]["a"]["weights_sha256"] for one in (tmp_path / "alone", served.folder)]
    assert sums[0] == sums[1] is not None


def test_a_server_that_comes_back_may_have_more_models_and_none_that_changed(serve, tmp_path):
    served = serve()
    assert served.stop() == 0
    file = served.folder.parent.with_suffix(".yaml")
    more = FILE + FILE[FILE.index("        rlmux/tiny:") :].replace("rlmux/tiny", "rlmux/other")
    file.write_text(more)
    lane = load_service_file(file, policies=list(POLICIES))[LANE]
    HostedLane(served.folder.parent, LANE, lane)
    for changed, told in (
        (more.replace("slots: 8", "slots: 4"), r"models.rlmux/tiny: not as it was served .* accepted: the model as it"),
        (f"{more}      parameters: lora\n", "serve.parameters is lora; accepted: full, as in"),
    ):
        file.write_text(changed)
        with pytest.raises(UserError, match=told):
            HostedLane(served.folder.parent, LANE, load_service_file(file, policies=list(POLICIES))[LANE])
    file.write_text(FILE.partition("    serve:")[0])
    bare = load_service_file(file, policies=list(POLICIES))[LANE]
    with pytest.raises(UserError, match="has clients' models; accepted: the lane with serve"):
        LaneController(served.folder.parent, LANE, bare)
    assert run_command_line(["resume", str(served.folder)]) == 2
