"""What is wrong with `rollout.engine` is one line before anything starts: environment, version, model or server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.checkpoints import CONFIG, write_checkpoint
from tests.server_environments import make_environment, make_python

from rlmux.core.errors import UserError
from rlmux.rl.config import EngineConfig, ModelConfig
from rlmux.rl.user_code.engine_check import check_engine, check_version, remark_on
from rlmux.rl.user_code.reward_preflight import complaint_about

QWEN3 = ModelConfig()


def refusal(engine: EngineConfig, model: ModelConfig = QWEN3) -> str:
    with pytest.raises(UserError) as caught:
        check_engine(engine, model)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_an_environment_that_has_the_engine_tells_its_version(tmp_path: Path) -> None:
    assert check_engine(EngineConfig(), QWEN3) is None
    for name, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        python = make_environment(tmp_path / name, name)
        assert check_engine(EngineConfig(name=name, python=python), QWEN3) == version  # type: ignore[arg-type]


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    absent, broken = tmp_path / "absent", make_python(tmp_path, "exit 3")
    assert refusal(EngineConfig(name="vllm", python=str(absent))) == (
        f"rollout.engine.python: {absent}: no such file; accepted: the python of an environment that has vllm"
    )
    assert refusal(EngineConfig(name="vllm", python=broken)) == (
        f"rollout.engine.python: {broken} is no python that runs; accepted: one of an environment that has vllm"
    )


def test_an_engine_that_is_not_installed_is_refused_with_how_it_is(tmp_path: Path) -> None:
    python = make_environment(tmp_path, "vllm")
    assert refusal(EngineConfig(name="sglang", python=python)) == (
        f"rollout.engine.python: {python}: sglang is not installed in this environment; accepted: one that has it "
        "(pip install sglang)"
    )


@pytest.mark.parametrize("version", ["0.19.1", "0.9.2", "dev"])
def test_a_version_whose_endpoints_are_not_known_is_refused(tmp_path: Path, version: str) -> None:
    python = make_environment(tmp_path, "vllm", version=version)
    assert refusal(EngineConfig(name="vllm", python=python)) == (
        f"rollout.engine.python: {python} has vllm {version}, whose endpoints are not known; accepted: 0.20 or "
        "newer; 0.33 is the newest that was read"
    )


@pytest.mark.parametrize("version", ["0.20.0", "0.24.0+cpu", "0.33.1rc1", "1.0"])
def test_a_known_version_and_a_newer_one_are_tried_and_the_newer_one_is_remarked_on(version):
    check_version("vllm", version, "it")
    remark = remark_on("vllm", version)
    assert (remark is not None) == (version == "1.0")
    assert remark in (
        None,
        "vllm 1.0 is newer than 0.33, the newest whose endpoints were read: it is tried",
    )


def test_a_model_that_the_engine_does_not_name_is_refused(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", "vllm", serves="Gemma3ForCausalLM")
    engine = EngineConfig(name="vllm", python=python)
    assert refusal(engine).startswith("rollout.engine: vllm 0.32.0 does not serve Qwen3ForCausalLM (nothing in ")
    folder = write_checkpoint(tmp_path / "ckpt")
    model = ModelConfig(path=str(folder))
    assert refusal(engine, model).startswith(f"model.path: config.json of {folder} names no architecture")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Gemma3ForCausalLM"]}))
    assert check_engine(engine, model) == "0.32.0"


@pytest.fixture
def answering() -> Iterator[tuple[str, dict[str, str]]]:
    """A server on this machine that answers each path with what the mapping says."""
    answers: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = answers.get(self.path, "").encode()
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()


def test_a_server_that_answers_as_its_kind_tells_its_version(answering: tuple[str, dict[str, str]]) -> None:
    url, answers = answering
    answers |= {"/version": '{"version": "0.33.0"}', "/server_info": '{"version": "0.5.23", "more": 1}'}
    assert check_engine(EngineConfig(name="vllm", url=url), QWEN3) == "0.33.0"
    assert check_engine(EngineConfig(name="sglang", url=url), QWEN3) == "0.5.23"
    answers["/version"] = '{"version": "0.9.1"}'
    assert refusal(EngineConfig(name="vllm", url=url)) == (
        f"rollout.engine.url: {url} has vllm 0.9.1, whose endpoints are not known; accepted: 0.20 or "
        "newer; 0.33 is the newest that was read"
    )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("<html>\n another program </html>", "200 '<html> another program </html>'"),
        ('{"version": 3}', "200 '{\"version\": 3}'"),
        ("[]", "200 '[]'"),
        ("", "404 ''"),
    ],
)
def test_a_server_that_answers_something_else_is_refused(
    answering: tuple[str, dict[str, str]], content: str, shown: str
) -> None:
    url, answers = answering
    answers["/version"] = content
    assert refusal(EngineConfig(name="vllm", url=url)) == (
        f"rollout.engine.url: {url}: /version is answered {shown}; accepted: a running vllm server"
    )


def test_a_url_where_nothing_answers_is_refused_before_a_pipeline_starts(make_config, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"  # free again below
    engine = EngineConfig(name="sglang", url=url)
    assert complaint_about(make_config("sort", rollout={"engine": engine})) == refusal(engine)
    assert refusal(engine).startswith(f"rollout.engine.url: {url} does not answer (")
    assert refusal(engine).endswith("; accepted: a running sglang server")
