"""An address of an API answers with itself, with the methods that it takes, or not at all: never with a page."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import APIRouter

from rlmux.service.addresses import Listening
from rlmux.service.dashboard import pages
from rlmux.service.dashboard.router import PREFIX
from rlmux.service.http_server import Server

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def test_every_address_names_the_methods_that_it_takes_to_one_that_it_does_not(dashboard, finished_run):
    shown = dashboard(finished_run, is_started=False)
    taken: dict[str, set[str]] = {}
    for address in shown.dashboard.addresses:
        path = PREFIX + re.sub(r"\{\w+(:path)?\}", "1", address.path)
        taken.setdefault(path, set()).update(("GET", "HEAD") if address.method == "GET" else (address.method,))
    for path, methods in taken.items():
        for method in METHODS:
            if method not in methods:
                answer = shown.client.request(method, f"{shown.url}{path}")
                named = set(answer.headers.get("Allow", "").split(", "))
                assert (path, method, answer.status_code, methods <= named) == (path, method, 405, True)


def nothing() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("HEAD", "/v1/chat/completions", 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("POST", "/v1/chat/completions", 200, None),
        ("GET", "/v1/models", 200, None),
        ("GET", "/v1/completion", 404, None),
        ("GET", "/v1", 404, None),
        ("GET", "/api", 404, None),
        ("GET", "/inference/v1/generate", 404, None),
        ("GET", "/tinker", 404, None),
    ],
)
def test_no_address_of_an_api_is_answered_with_a_page(method, path, status, allowed):
    api = APIRouter()
    api.add_api_route("/v1/chat/completions", nothing, methods=["POST"])
    api.add_api_route("/v1/models", nothing, methods=["GET"])
    server = Server(Listening())
    server.mount("", api)
    server.mount("", pages.router(server))
    server.start()
    try:
        answer = httpx.request(method, server.url + path)
        assert (answer.status_code, answer.headers.get("Allow")) == (status, allowed)
        if method == "GET" and status == 405:
            assert answer.json()["detail"] == "takes no GET"
            assert answer.json()["accepted"] == "POST"
    finally:
        server.close()
