"""A service that is drained takes nothing more, and its next start goes on with everything."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from tests.service.service_process import Service
from tests.small_files import SORT, small_file

from rlmux.core.errors import UserError
from rlmux.log.run_log import LogReader


@pytest.fixture
def service(tmp_path) -> Iterator[Service]:
    pytest.importorskip("torch")
    one = Service(tmp_path)
    one.start()
    try:
        yield one
    finally:
        with contextlib.suppress(Exception):
            one.kill()
        with contextlib.suppress(ProcessLookupError, AssertionError):
            one.kill_controller()


def submit(service: Service, name: str, steps: int) -> int:
    text = small_file(SORT.replace("name: a", f"name: {name}"), steps=steps).partition("\n")[2]
    (service.folder / f"{name}.yaml").write_text(text)
    return service.rlmux("submit", str(service.folder / f"{name}.yaml"), "--to", f"{service.url}/lanes/cpu").code


def steps_of(service: Service) -> int:
    with LogReader(service.lane) as log:
        return log.state().steps.get("a", 0)


@pytest.mark.slow
def test_a_drained_service_refuses_submissions_and_goes_on_after_its_next_start(service):
    service.until_up()
    assert submit(service, "a", 2000) == 0
    service.until(lambda: steps_of(service) >= 2, "a step of `a`")
    said = service.rlmux("drain", str(service.root), "--keep-pages")
    assert (said.code, said.out.splitlines()[0]) == (0, "lane cpu: stopped")
    assert service.controller is None
    assert submit(service, "b", 2) != 0
    text = small_file(SORT, steps=2).partition("\n")[2]
    answer = service.client.post(
        "/submissions", json={"lane": "cpu", "text": text, "source": "b"}, headers={"Idempotency-Key": "b"}
    )
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
    row = service.client.get("/lanes/cpu").json()
    assert row["state"] == "stopped"
    assert row["banner"].startswith("the service drains: ")
    said = service.rlmux("drain", str(service.root), "--json")
    assert said.code == 0
    assert json.loads(said.out) == {
        "folder": str(service.root), "lanes": [], "serve": f"rlmux serve FILE --out {service.root}",
    }  # fmt: skip
    assert service.process is not None
    assert service.process.wait(30) in (0, 130)
    service.client.close()
    service.process.communicate()
    before = steps_of(service)
    service.start()
    service.until(lambda: steps_of(service) > before, "a further step of `a`")
    assert submit(service, "b", 2) == 0


def test_a_folder_of_no_service_is_not_drained(tmp_path):
    from rlmux.client.in_folder import drain

    with pytest.raises(UserError, match="no service has been here; accepted: the folder of a service"):
        drain(tmp_path, keeps_pages=False, on_end=print)
