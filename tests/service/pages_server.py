"""The pages of a folder on a server of this process, and what asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests import waiting

from rlmux.service.addresses import Listening
from rlmux.service.dashboard.auth.access import Limits
from rlmux.service.dashboard.dashboard import Dashboard
from rlmux.service.http_server import Server

MANY = Limits(requests_per_s=1e6, burst=1e6, logins_per_minute=1e6)


class Pages:
    """Close it at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: Limits = MANY,
        is_indexed: bool = True,
        is_started: bool = True,
        listening: Listening | None = None,
        **more: Any,
    ) -> None:
        self.server = Server(listening or Listening())
        self.dashboard = Dashboard(folder, self.server, limits=limits, **more)
        self.server.start()
        if is_started:
            self.dashboard.start()
        self.url, self.token = self.server.url, self.dashboard.token
        self.client = httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=60,
            verify=False,
        )
        self.anyone = httpx.Client(verify=False, timeout=60)
        """A client that is not known. Plain HTTP: certificates would cost each half a second."""
        if is_started and is_indexed:
            try:
                self.until(
                    lambda: all(not lane["is_indexing"] for lane in self.get("/lanes")["items"]), "all lanes indexed"
                )
            except BaseException:
                self.close()
                raise

    def until(self, is_so: Any, what: str = "what the test asks the pages for") -> None:
        waiting.until(is_so, what, seen=lambda: self.client.get("/lanes").text, poll_s=0.05)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer that is 200."""
        answer = self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ticket(self) -> str:
        """A secret for one login."""
        return self.dashboard.access.make_ticket()

    def browser(self) -> httpx.Client:
        """A client that is logged in as a page of the server would be."""
        client = httpx.Client(base_url=f"{self.url}/api/v1", headers={"Origin": self.url}, timeout=60, verify=False)
        assert client.post("/login", json={"ticket": self.ticket()}).status_code == 200
        return client

    def close(self) -> None:
        self.client.close()
        self.anyone.close()
        self.server.close()
        self.dashboard.close()


def events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(event, data, id) of a stream's lines; a comment is an event of the name `:`."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            yield ":", line, ""
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields.get("event"):
            yield fields["event"], fields.get("data", ""), fields.get("id", "")
            fields = {}
        else:
            fields = {}
