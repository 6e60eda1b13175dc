"""A lane of a server, over HTTP: the API of docs/reference/service.md.

    RLMUX_TOKEN, or the file that RLMUX_TOKEN_FILE names ─▶ bearer token

A submission is retried with its own key while the server is away, and is accepted once. A read may be retried at any
time, a change only if it cannot have arrived.
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from rlmux.client.bundle import pack
from rlmux.client.own_service import own_token
from rlmux.config import Spec
from rlmux.config.load import parse_spec
from rlmux.core.errors import UserError

if TYPE_CHECKING:
    import httpx

_LIMIT_S = 60.0
_AWAY_S = 30.0
"""Seconds of a submission's retries while the server is away or not ready."""
_AGAIN_S = 0.5
CA_FILE = "SSL_CERT_FILE"


class OnServer:
    """A Target."""

    def __init__(self, url: str, on_notice: Callable[[str], None], patience_s: float = 0.0) -> None:
        """`on_notice`: receives one line for each upload and each lost connection. `patience_s`: seconds of retries of
        an unreachable server; at least 30 for a submission.

        Raises UserError for an invalid lane URL and without a token. Sends no request.
        """
        import httpx

        parts = urlsplit(url)
        words = [word for word in parts.path.split("/") if word]
        if parts.scheme not in ("http", "https") or not parts.hostname or words[:1] not in ([], ["lanes"]) or words[2:]:
            raise UserError(
                f"{url}: accepted: http://HOST:PORT/lanes/NAME, or http://HOST:PORT where there is one lane"
            )
        self._on_notice = on_notice
        self._patience_s = patience_s
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._named = words[1] if len(words) == 2 else None
        headers = {"Authorization": f"Bearer {_token(self._url)}"}
        self._client = httpx.Client(
            base_url=f"{self._url}/api/v1",
            headers=headers,
            timeout=_LIMIT_S,
            trust_env=False,  # a proxy would receive requests for this machine
            verify=_trusted() if parts.scheme == "https" else False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a server that was killed meanwhile has no stale ones
        )

    def spec(self) -> Spec:
        found = self._request("GET", f"/lanes/{self._lane}/spec", patience_s=self._long_patience_s)
        folder = Path.cwd()
        return parse_spec(_without_code(found["text"]), source=found["source"], folder=folder, may_be_empty=True)

    def submit(self, spec: Spec, source: str) -> list[dict[str, Any]]:
        packed = pack(spec)
        if packed.sha256 is not None:
            self._upload(packed.data, packed.sha256, packed.names)
        body = {"lane": self._lane, "text": packed.text, "source": source, "bundle": packed.sha256}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        answer: list[dict[str, Any]] = self._request(
            "POST", "/submissions", json=body, headers=headers, patience_s=self._long_patience_s, may_repeat=True
        )["pipelines"]
        return answer

    def send_command(self, request: str, name: str, **fields: Any) -> dict[str, Any]:
        address = f"/pipelines/{self._lane}/{quote(name, safe='')}/{request}"
        answer: dict[str, Any] = (
            self._request("GET", address) if request == "why" else self._request("POST", address, json=fields)
        )
        return answer

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = self._request("GET", f"/lanes/{self._lane}/status")
        return shown

    def queue(self) -> dict[str, Any]:
        shown: dict[str, Any] = self._request("GET", f"/lanes/{self._lane}/queue")
        return shown

    def alerts(self) -> list[dict[str, Any]]:
        firing: list[dict[str, Any]] = self._request("GET", f"/lanes/{self._lane}/alerts")["items"]
        return firing

    def acknowledge(self, rule: str, pipeline: str | None) -> list[dict[str, Any]]:
        body = {"rule": rule, "pipeline": pipeline}
        seen: list[dict[str, Any]] = self._request("POST", f"/lanes/{self._lane}/alerts", json=body)["items"]
        return seen

    def samples(self, name: str, filters: Mapping[str, Any], *, sort: str, at: int, limit: int) -> dict[str, Any]:
        params = {**filters, "sort": sort, "cursor": at, "limit": limit}
        shown: dict[str, Any] = self._request("GET", f"{self._pipeline(name)}/samples", params=params)
        return shown

    def sample(self, name: str, step: int, prompt: int, sample: int, *, special_tokens: bool) -> dict[str, Any]:
        params = {"special_tokens": "true"} if special_tokens else {}
        address = f"{self._pipeline(name)}/samples/{step}/{prompt}/{sample}"
        shown: dict[str, Any] = self._request("GET", address, params=params)
        return shown

    def steps(self, name: str | None) -> dict[str, list[dict[str, Any]]]:
        return {
            pipeline: list(self._steps_of(pipeline)) for pipeline in ([name] if name is not None else self._names())
        }

    def _steps_of(self, name: str) -> Iterator[dict[str, Any]]:
        cursor: str | None = "0"
        while cursor is not None:
            page = self._request("GET", f"{self._pipeline(name)}/steps", params={"limit": 1000, "cursor": cursor})
            yield from page["items"]
            cursor = page["next"]

    def _names(self) -> Iterator[str]:
        cursor: str | None = "0"
        while cursor is not None:
            params = {"lane": unquote(self._lane), "limit": 500, "cursor": cursor}
            page = self._request("GET", "/pipelines", params=params)
            yield from (row["name"] for row in page["items"])
            cursor = page["next"]

    def _pipeline(self, name: str) -> str:
        return f"/pipelines/{self._lane}/{quote(name, safe='')}"

    def step_causes(self, name: str) -> dict[str, Any] | None:
        shown: dict[str, Any] = self._request("GET", f"{self._pipeline(name)}/causes", params={"steps": 1000})
        del shown["as_of_seq"]
        return shown if shown["num_steps"] else None

    def log(self, name: str, position: int) -> tuple[str, int]:
        address = f"/pipelines/{self._lane}/{quote(name, safe='')}/logs"
        text = ""
        while True:
            answer = self._send("GET", address, params={"offset": position, "limit": 1 << 18})
            if answer.status_code in (404, 503):  # nothing was printed yet, or nothing of it is indexed
                return text, position
            parsed = self._parsed(answer)
            text, position = text + parsed["text"], parsed["next_offset"]
            if parsed["is_end"] or not parsed["text"]:
                return text, position

    def header(self) -> dict[str, Any]:
        lane = self._request("GET", f"/lanes/{self._lane}")
        return {key: lane.get(key) for key in ("run_id", "created")}

    def usage(self) -> dict[str, Any]:
        parsed: dict[str, Any] = self._request("GET", f"/lanes/{self._lane}/usage")
        return parsed

    def usage_since(self, since: str, until: str | None) -> dict[str, Any]:
        """Where the device time of all lanes went."""
        params = {"since": since, **({} if until is None else {"until": until})}
        parsed: dict[str, Any] = self._request("GET", "/usage", params=params)
        return parsed

    def set_shares(self, text: str, source: str) -> dict[str, Any]:
        body = {"text": text, "source": source}
        parsed: dict[str, Any] = self._request("POST", f"/lanes/{self._lane}/shares", json=body)
        return parsed

    def audit(self, limit: int, user: str | None) -> list[dict[str, Any]]:
        """Rows of the server's audit log, newest first."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = "0"
        while cursor is not None and len(rows) < limit:
            params = {
                "limit": min(500, limit - len(rows)),
                "cursor": cursor,
                **({} if user is None else {"user": user}),
            }
            page = self._request("GET", "/audit", params=params)
            rows, cursor = [*rows, *page["items"]], page["next"]
        return rows

    def remove_lane(self, name: str, *, is_dry: bool) -> int:
        """Remove a lane that the service's file no longer names; returns its bytes."""
        body = {"dry_run": True} if is_dry else {}
        return int(self._request("POST", f"/lanes/{quote(name, safe='')}/remove", json=body)["freed_bytes"])

    def page(self, names: Sequence[str]) -> str | None:
        if len(names) == 1:
            return f"{self._url}/pipelines/{self._lane}/{quote(names[0], safe='')}"
        return f"{self._url}/pipelines?lane={self._lane}"

    def close(self) -> None:
        self._client.close()

    @property
    def _lane(self) -> str:
        """The lane that the URL names, or the only one there is."""
        if self._named is None:
            names = [lane["name"] for lane in self._request("GET", "/lanes")["items"]]
            if len(names) != 1:
                accepted = ", ".join(f"{self._url}/lanes/{name}" for name in names) or "a server with a lane"
                raise UserError(f"{self._url} has {len(names)} lanes; accepted: {accepted}")
            (self._named,) = names
        return quote(self._named, safe="")

    def _upload(self, data: bytes, sha256: str, names: tuple[str, ...]) -> None:
        if self._send("GET", f"/bundles/{sha256}", patience_s=self._long_patience_s).status_code == 200:
            return
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        self._on_notice(f"sends {len(names)} files, {len(data) / 1e3:.1f} kB: {shown}")
        headers = {"Content-Type": "application/gzip"}
        patience_s = self._long_patience_s
        self._request("POST", "/bundles", content=data, headers=headers, patience_s=patience_s, may_repeat=True)

    def _request(self, method: str, address: str, **more: Any) -> Any:
        return self._parsed(self._send(method, address, **more))

    @property
    def _long_patience_s(self) -> float:
        return max(_AWAY_S, self._patience_s)

    def _send(
        self,
        method: str,
        address: str,
        *,
        patience_s: float | None = None,
        may_repeat: bool | None = None,
        **more: Any,
    ) -> httpx.Response:
        """The response. Retried for `patience_s` while the server is away or not ready.

        `may_repeat`: whether it may arrive twice; None: reads may. Others are retried only if they did not arrive.
        """
        import httpx

        may_repeat = method == "GET" if may_repeat is None else may_repeat
        patience_s = self._patience_s if patience_s is None else patience_s
        end_s, has_warned = time.monotonic() + patience_s, False
        while True:
            try:
                answer = self._client.request(method, address, **more)
                if not _may_answer_later(answer) or time.monotonic() >= end_s:
                    return answer
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if not may_repeat and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                    raise UserError(
                        f"{self._url}: no answer ({str(error) or type(error).__name__}): it may have been carried out; "
                        "accepted: the same again, once the status shows that it was not"
                    ) from None
                is_distrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
                if time.monotonic() >= end_s or is_distrusted:
                    accepted = "the address of a server that runs (rlmux serve)"
                    if is_distrusted:
                        accepted = f"{CA_FILE}=FILE (PEM) with the server's certificate, or its authority's"
                    raise UserError(
                        f"{self._url}: cannot be reached: {str(error) or type(error).__name__}; accepted: {accepted}"
                    ) from None
                if not has_warned:
                    self._on_notice(f"{self._url} cannot be reached; tried for {patience_s:.0f} s")
                    has_warned = True
            time.sleep(_AGAIN_S)

    def _parsed(self, answer: httpx.Response) -> Any:
        """The JSON of a response. Raises UserError with the server's error."""
        try:
            parsed = answer.json()
        except ValueError:
            parsed = None
        if answer.is_success and parsed is not None:
            return parsed
        if answer.status_code == 401:
            raise UserError(
                f"{self._url}: the token is not this server's, or has ended; accepted: the token that "
                "you were given for it (rlmux token add; its owner's is in admin.token)"
            )
        if not isinstance(parsed, dict) or "detail" not in parsed:
            raise UserError(f"{self._url}: answered {answer.status_code}; accepted: the address of `rlmux serve`")
        accepted = f"; accepted: {parsed['accepted']}" if parsed.get("accepted") else ""
        raise UserError(f"{parsed['detail']}{accepted}")


def _may_answer_later(answer: httpx.Response) -> bool:
    """Whether the server is not ready or limits the rate. A reached quota is final."""
    return answer.status_code == 503 or (answer.status_code == 429 and "retry-after" in answer.headers)


def _trusted() -> ssl.SSLContext:
    """Trusted certificates, from SSL_CERT_FILE or SSL_CERT_DIR, else from httpx."""
    import httpx

    path = os.environ.get(CA_FILE)
    try:
        return httpx.create_ssl_context(trust_env=True)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or "is no certificate"
        raise UserError(f"{CA_FILE} {path}: {why}; accepted: a PEM file with certificates") from None


def _token(url: str) -> str:
    """The token of this process's environment, or of this user's own service."""
    token, path = os.environ.get("RLMUX_TOKEN", ""), os.environ.get("RLMUX_TOKEN_FILE", "")
    if not token and path:
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UserError(
                f"RLMUX_TOKEN_FILE {path}: {error.strerror}; accepted: a file with the token that "
                "you were given for the server (its owner's: admin.token)"
            ) from None
    token = token or own_token(url) or ""
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(
            f"{url}: no token; accepted: RLMUX_TOKEN=..., or RLMUX_TOKEN_FILE=FILE, with the token that you were "
            "given for it (its owner's: admin.token in the server's folder)"
        )
    return token


def _without_code(text: str) -> str:
    """The lane's file as it is checked here: its code lies on the server's machine."""
    import yaml

    plain = yaml.safe_load(text)
    return yaml.safe_dump({"cluster": plain["cluster"], "policy": plain["policy"]}, sort_keys=False)
