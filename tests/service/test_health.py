"""Probes are answered on an address of their own, which says how many lanes are ready and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rlmux.core.errors import UserError
from rlmux.service.addresses import Listening
from rlmux.service.health import HealthAddress
from rlmux.service.http_server import Server


class Lanes:
    """Lanes of which some are ready."""

    num_ready = 1

    def __call__(self) -> tuple[int, int]:
        return self.num_ready, 2


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


@pytest.fixture
def url(lanes) -> Iterator[str]:
    server, health = Server(Listening()), HealthAddress("127.0.0.1", 0, lanes)
    server.run_beside(health.run)
    server.start()
    yield f"http://127.0.0.1:{health.port}"
    server.close()
    health.close()


def test_a_server_lives_while_it_answers_and_is_ready_once_every_lane_is(url, lanes):
    assert httpx.get(f"{url}/healthz").text == "alive\n"
    waiting = httpx.get(f"{url}/readyz")
    assert (waiting.status_code, waiting.text) == (503, "1 of 2 lanes ready\n")
    lanes.num_ready = 2
    assert httpx.get(f"{url}/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/v1/lanes", "/api/v1/metrics"])
def test_nothing_else_is_at_that_address(url, path):
    assert httpx.get(f"{url}{path}").status_code == 404


def test_an_address_that_is_taken_is_one_line(url):
    port = int(url.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"--health 127.0.0.1:{port}: Address already in use; accepted: a free"):
        HealthAddress("127.0.0.1", port, lambda: (0, 0))


def test_its_port_is_free_again_once_the_server_is_closed(lanes):
    server, health = Server(Listening()), HealthAddress("127.0.0.1", 0, lanes)
    server.run_beside(health.run)
    server.start()
    port = health.port
    server.close()
    health.close()
    HealthAddress("127.0.0.1", port, lanes).close()
