"""Text of strangers in names, reasons and logs, and a stranger's page in the same browser: no effect at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.log_script import ROLLOUT, LogScript, order
from tests.service.pages.conftest import HOSTILE_HOST
from tests.service.pages_server import Pages

from rlmux.core.events import StageFinished
from rlmux.core.model import Stage
from rlmux.report.samples import KeptSample, SampleWriter

pytestmark = pytest.mark.xdist_group("browser")
PWN = "window.__pwned=1"
PAYLOADS = tuple(
    frame.format(tag)
    for tag in (
        f"<script>{PWN}</script>",
        f"<img src=x onerror={PWN}>",
        f"<svg onload={PWN}>",
        f"<iframe srcdoc='<script>parent.{PWN}</script>'>",
        f"<a href=javascript:{PWN} autofocus onfocus={PWN}>x</a>",
        f"<details open ontoggle={PWN}>",
        f"<style onload={PWN}></style>",
        f"javascript:{PWN}",
        f"{{{{constructor.constructor('{PWN}')()}}}}",
        f"<math><mtext><img src=x onerror={PWN}>",
        f"<body onload={PWN}>",
        f"<video><source onerror={PWN}></video>",
        f"<audio src=x onerror={PWN}></audio>",
        f"<input autofocus onfocus={PWN}>",
        f"<select autofocus onfocus={PWN}><option>x</select>",
        f"<textarea autofocus onfocus={PWN}></textarea>",
        f"<marquee onstart={PWN}>x</marquee>",
        f"<object data=javascript:{PWN}></object>",
        f"<embed src=javascript:{PWN}>",
        f"<form action=javascript:{PWN}><button>x</button></form>",
        f"<base href=javascript:{PWN}//>",
        f"<meta http-equiv=refresh content='0;url=javascript:{PWN}'>",
        f"<svg><animate onbegin={PWN} attributeName=x dur=1s>",
        f"<svg><script>{PWN}</script></svg>",
        f"<link rel=stylesheet href=x onerror={PWN}>",
        f"<template><script>{PWN}</script></template>",
        f"<noscript><p title='</noscript><img src=x onerror={PWN}>'>",
        f"<p style='animation:x' onanimationstart={PWN}>",
        f"<a href='data:text/html,<script>{PWN}</script>'>x</a>",
        f"<iframe src=javascript:parent.{PWN}>",
        f"[x](javascript:{PWN})",
        f"![x](x onerror={PWN})",
        f"${{{PWN}}}",
        f"<%= {PWN} %>",
        f"__proto__[onerror]={PWN}",
        f"<img/src=x/onerror={PWN}//",
    )
    for frame in (
        "{}",
        '">{}',
        "'>{}",
        "</pre>{}",
        "</title>{}",
        "\x1b[31m{}",
        "--><!--{}",
        "]]>{}",
        "\\u003c{}",
        "${{{}}}",
        "</textarea>{}",
        "</script>{}",
        "<!--{}",
        "\u202e{}",
    )
)
NAMES = PAYLOADS[:140]
"""Those that pipelines are called by."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A run with payloads in every text that the pages show."""
    script = LogScript(policy=PAYLOADS[1])
    for number, name in enumerate(("plain", *NAMES), 1):
        first = order(number, name, Stage.GENERATE, ROLLOUT)
        script.submit(number - 1.0, name, first)
        script.event(StageFinished(time_s=number - 0.5, order=number, seconds=0.4))
        script.note(number - 0.4, "step", pipeline=name, step=1, metrics={PAYLOADS[1]: 1.0, "reward_mean": 0.5})
        ending = {"status": "failed", "reason": f"why: {PAYLOADS[-number % len(PAYLOADS)]}", "weights_sha256": None}
        script.note(number - 0.3, "pipeline_end", pipeline=name, **ending)
    folder = script.write(tmp_path_factory.mktemp("runs") / "run <img src=x onerror=window.__pwned=1>")
    (folder / "plain").mkdir()
    (folder / "plain" / "workers.log").write_text("\n".join(PAYLOADS) + "\n", encoding="utf-8")
    writer = SampleWriter(folder / "plain" / "samples.db")
    figures = {"reward": 0.5, "advantage": 0.0, "stop": PAYLOADS[0], "tokens": 9, "num_turns": 1}
    said = [((True, each), (False, each)) for each in ("\n".join(PAYLOADS), *PAYLOADS)]
    writer.add(
        1,
        [
            KeptSample(
                prompt=0, sample=at, prompt_text=turns[0][1], turns=turns, first_version=0, last_version=0, **figures
            )
            for at, turns in enumerate(said)
        ],
    )
    writer.close()
    served = Pages(folder)
    yield served
    served.close()


@pytest.mark.slow
def test_no_script_in_any_text_runs(hostile, enter):
    page = enter(hostile, "/fleet")
    page.wait_for_selector("text=Needs you")
    lane = hostile.get("/lanes")["items"][0]["name"]
    given = {"labels": [one for one in PAYLOADS if len(one) <= 64 and "," not in one and one.isprintable()][:20]}
    labelled = f"/pipelines/{quote(lane, safe='')}/plain/labels"
    assert hostile.client.post(labelled, json={**given, "note": "\n".join(PAYLOADS)[:10_000]}).status_code == 200
    for path in (
        "/timeline",
        "/pipelines",
        "/pipelines?name=" + PAYLOADS[1],
        "/timeline?q=" + PAYLOADS[1],
        "/" + PAYLOADS[2],
    ):
        page.goto(f"{hostile.url}{path}")
        page.wait_for_selector("main h1, main .empty")
    page.goto(f"{hostile.url}/pipelines")
    page.locator(".label").nth(19).wait_for()
    assert page.locator(".label").all_inner_texts() == given["labels"]
    page.click("[aria-label='labels and note of plain']")
    assert "constructor" in page.input_value("textarea[name=note]")
    name = next(one for one in PAYLOADS if one.startswith("<img"))
    page.locator("tbody .name", has_text=name).first.click()
    page.wait_for_selector(".tabs")
    assert name in page.inner_text("h1")
    assert lane in page.inner_text("header")
    page.goto(f"{hostile.url}/pipelines/{quote(lane, safe='')}/plain?tab=log")
    page.wait_for_selector("pre:has-text('constructor')")
    assert all(visible(each) in page.inner_text("pre") for each in PAYLOADS)
    page.goto(f"{hostile.url}/pipelines/{quote(lane, safe='')}/plain?tab=samples&open=1.0.0&step=1")
    page.wait_for_selector("pre.model")
    page.locator("button", has_text="More").click()
    page.locator("td.start").nth(99).wait_for()
    shown = page.inner_text("pre.model")
    assert all(visible(each) in shown for each in PAYLOADS)
    assert page.evaluate("typeof window.__pwned") == "undefined"


def visible(text: str) -> str:
    """As the pages show it: without colours."""
    return text.replace("\x1b[31m", "")


def test_a_strangers_page_reads_nothing_and_changes_nothing(shown, enter, context):
    page = enter(shown, "/fleet")
    stranger = page.context.new_page()
    origin = f"http://{HOSTILE_HOST}:1"
    page.context.route(f"{origin}/**", lambda route: route.fulfill(content_type="text/html", body="<h1>free GPUs</h1>"))
    stranger.goto(f"{origin}/")
    statuses: dict[str, Any] = {}
    stranger.on("response", lambda told: statuses.update({f"{told.request.method} {told.url}": told.status}))
    outcome = stranger.evaluate(ATTACK, shown.url)
    assert set(outcome.values()) == {"nothing"}, outcome
    assert {status for said, status in statuses.items() if shown.url in said and said.startswith("POST")} <= {
        401,
        403,
        415,
    }
    page.reload()
    page.wait_for_selector("main h1")  # still logged in: the logout of the stranger was none


ATTACK = """async (url) => {
  const said = {};
  const tried = async (name, call) => { said[name] = await call().then((value) => value, () => "nothing"); };
  const mine = {credentials: "include"};
  const blind = {...mine, method: "POST", mode: "no-cors", body: "{}"};
  const promised = (begin) => () => new Promise(begin);
  await tried("read", () => fetch(url + "/api/v1/lanes", mine).then((told) => told.text()));
  await tried("logout", () => fetch(url + "/api/v1/logout", blind).then(() => "nothing"));
  await tried("delete", () => fetch(url + "/api/v1/lanes", {...mine, method: "DELETE"}).then((told) => told.text()));
  await tried("stream", promised((done) => {
    const stream = new EventSource(url + "/api/v1/stream", {withCredentials: true});
    stream.onmessage = () => done("heard");
    stream.onopen = () => done("open");
    stream.onerror = () => { stream.close(); done("nothing"); };
  }));
  await tried("image", promised((done) => {
    const image = new Image();
    image.onload = () => done("seen");
    image.onerror = () => done("nothing");
    image.src = url + "/favicon.svg";
  }));
  await tried("frame", promised((done) => {
    const frame = document.createElement("iframe");
    frame.onload = () => {
      try { done(frame.contentDocument.body.innerText || "nothing"); } catch { done("nothing"); }
    };
    frame.src = url + "/fleet";
    document.body.append(frame);
  }));
  return said;
}"""


def test_another_name_for_this_machine_gets_no_byte(shown, context):
    page = context().new_page()
    port = shown.url.rpartition(":")[2]
    for path in ("/", "/favicon.svg", "/api/v1/health", f"/login#t={shown.ticket()}"):
        answer = page.goto(f"http://{HOSTILE_HOST}:{port}{path}")
        assert answer.status == 421
