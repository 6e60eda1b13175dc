"""The clients of OpenAI and Anthropic, unchanged, against the address that programs ask."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import until

from rlmux.core.errors import UserError
from rlmux.rl.agents.chat_messages import answer_of
from rlmux.rl.agents.gateway import Caller, Gateway
from rlmux.rl.agents.session import Answer, Ask, AskRefusedError, SessionOverError

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

MODEL = "tiny"
CHAT = [{"role": "user", "content": "Where is the fox?"}]
FUNCTION = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "find", "description": "Finds.", "input_schema": {"type": "object", "properties": {}}}]
CALL_TEXT = '<tool_call>\n{"name": "find", "arguments": {"of": "fox"}}\n</tool_call>'


class Model:
    """In place of a session: answers at once, or keeps the questions."""

    def __init__(self) -> None:
        self.text = "In the den."
        self.error: Exception | None = None
        self.keeps = False
        self.asked: list[Ask] = []
        self.refusals: list[str] = []
        self.caller = Caller(put=self.put, note_refusal=self.refusals.append)

    def put(self, ask: Ask) -> None:
        self.asked.append(ask)
        if not self.keeps:
            self.answer(ask)

    def answer(self, ask: Ask) -> None:
        if self.error is not None:
            ask.answer.set_exception(self.error)
            return
        message = answer_of(ask.begins_with + self.text, has_tools=bool(ask.tools), call_ids="call_1_")
        finish_reason = "tool_calls" if "tool_calls" in message else "stop"
        ask.answer.set_result(
            Answer(
                message=message, text=self.text, tokens=[1, 2, 3], logprobs=[-1.0] * 3, finish_reason=finish_reason,
                num_prompt_tokens=7,
            )
        )  # fmt: skip


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(MODEL, tmp_path)
    yield made
    made.close()


@pytest.fixture
def model(gateway: Gateway) -> Model:
    made = Model()
    gateway.register("key", made.caller)
    return made


@pytest.fixture
def openai_client(gateway: Gateway) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{gateway.address}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(gateway: Gateway) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=gateway.address, api_key="key", max_retries=0) as client:
        yield client


def test_openai_chats(model: Model, openai_client: Any) -> None:
    said = openai_client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0.3, seed=1)
    assert (said.choices[0].message.content, said.choices[0].finish_reason) == ("In the den.", "stop")
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (7, 3)
    assert model.asked[0].messages == CHAT


def test_openai_streams(model: Model, openai_client: Any) -> None:
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "In the den."
    assert chunks[-1].usage.total_tokens == 10


def test_openai_calls_tools_and_takes_their_results(model: Model, openai_client: Any) -> None:
    model.text = CALL_TEXT
    said = openai_client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS).choices[0]
    (call,) = said.message.tool_calls
    assert (said.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
        "tool_calls",
        "find",
        {"of": "fox"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "here"}
    model.text = "Here."
    openai_client.chat.completions.create(model=MODEL, messages=[*CHAT, said.message, result], tools=TOOLS)
    called, told = model.asked[1].messages[1:]
    assert called["tool_calls"][0]["function"] == {"name": "find", "arguments": {"of": "fox"}}
    assert told == result


def test_openai_streams_calls(model: Model, openai_client: Any) -> None:
    model.text = CALL_TEXT
    with openai_client.chat.completions.stream(model=MODEL, messages=CHAT, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"of": "fox"}


@pytest.mark.parametrize(
    ("choice", "rest"),
    [
        ("required", '{"name": "find", "arguments": {}}\n</tool_call>'),
        ({"type": "function", "function": {"name": "find"}}, "{}}\n</tool_call>"),
    ],
)
def test_a_call_that_is_asked_for_is_one(model: Model, openai_client: Any, choice: Any, rest: str) -> None:
    model.text = rest
    said = openai_client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=choice)
    assert said.choices[0].message.tool_calls[0].function.name == "find"


def test_without_a_choice_there_are_no_tools(model: Model, openai_client: Any) -> None:
    model.text = CALL_TEXT
    said = openai_client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="none")
    assert (said.choices[0].message.tool_calls, said.choices[0].message.content) == (None, CALL_TEXT)
    assert model.asked[0].tools is None


def test_openai_completes_texts(model: Model, openai_client: Any) -> None:
    said = openai_client.completions.create(model=MODEL, prompt="Once", max_tokens=3, stop=["x"])
    assert said.choices[0].text == "In the den."
    assert (model.asked[0].text, model.asked[0].max_tokens, model.asked[0].stop) == ("Once", 3, ["x"])
    chunks = list(openai_client.completions.create(model=MODEL, prompt="Once", stream=True))
    assert [each.choices[0].text for each in chunks] == ["In the den."]


def test_openai_lists_the_one_model(model: Model, openai_client: Any) -> None:
    assert [each.id for each in openai_client.models.list()] == [MODEL]


def test_anthropic_chats(model: Model, anthropic_client: Any) -> None:
    said = anthropic_client.messages.create(model=MODEL, messages=CHAT, system="Be brief.", max_tokens=9)
    assert (said.content[0].text, said.stop_reason, said.usage.input_tokens) == ("In the den.", "end_turn", 7)
    assert model.asked[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_anthropic_streams_calls_and_takes_their_results(model: Model, anthropic_client: Any) -> None:
    model.text = f"Look.\n{CALL_TEXT}"
    asked = {"model": MODEL, "max_tokens": 9, "tools": ANTHROPIC_TOOLS}
    with anthropic_client.messages.stream(messages=CHAT, **asked) as stream:
        said = stream.get_final_message()
    text, use = said.content
    assert (text.text, use.name, use.input, said.stop_reason) == ("Look.", "find", {"of": "fox"}, "tool_use")
    assert said.usage.output_tokens == 3
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "here"}
    chat = [*CHAT, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    anthropic_client.messages.create(messages=chat, **asked)
    assert [each["role"] for each in model.asked[1].messages] == ["user", "assistant", "tool"]
    assert model.asked[1].tools == TOOLS


def test_an_unknown_key_is_an_authentication_error(model: Model, gateway: Gateway) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.address}/v1", api_key="other") as client,
        pytest.raises(openai.AuthenticationError, match="the key names no session that is under way"),
    ):
        client.chat.completions.create(model=MODEL, messages=CHAT)
    with (
        anthropic.Anthropic(base_url=gateway.address, api_key="other") as client,
        pytest.raises(anthropic.AuthenticationError, match="the key names no session that is under way"),
    ):
        client.messages.create(model=MODEL, messages=CHAT, max_tokens=9)


def test_another_model_is_not_found(model: Model, openai_client: Any, anthropic_client: Any) -> None:
    text = r"model: 'gpt-5'; accepted: 'tiny' \(task\.model_name\)"
    with pytest.raises(openai.NotFoundError, match=text):
        openai_client.chat.completions.create(model="gpt-5", messages=CHAT)
    with pytest.raises(anthropic.NotFoundError, match=text):
        anthropic_client.messages.create(model="gpt-5", messages=CHAT, max_tokens=9)
    assert len(model.refusals) == 2, "the session knows them, too"


def test_a_full_window_is_a_bad_request_with_its_code(model: Model, openai_client: Any, anthropic_client: Any) -> None:
    model.error = AskRefusedError("the chat has 99 tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="the chat has 99 tokens") as caught:
        openai_client.chat.completions.create(model=MODEL, messages=CHAT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="the chat has 99 tokens"):
        anthropic_client.messages.create(model=MODEL, messages=CHAT, max_tokens=9)


def test_too_many_turns_are_forbidden_and_an_ended_session_is_gone(model: Model, openai_client: Any) -> None:
    model.error = AskRefusedError("the session has had its 2 turns", "turn_limit")
    with pytest.raises(openai.PermissionDeniedError, match="the session has had its 2 turns"):
        openai_client.chat.completions.create(model=MODEL, messages=CHAT)
    model.error = SessionOverError("the session is over")
    with pytest.raises(openai.APIStatusError, match="the session is over") as caught:
        openai_client.chat.completions.create(model=MODEL, messages=CHAT)
    assert caught.value.status_code == 410


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b'{"messages": 5}', b'{"messages": [], "stop": 5}', b'{"stream_options": 5}', b"\xff"],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages"])
def test_a_body_that_is_no_question_is_a_bad_request(model: Model, gateway: Gateway, path: str, body: bytes) -> None:
    answer = httpx.post(f"{gateway.address}/v1/{path}", content=body, headers={"x-api-key": "key"})
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]


def test_options_of_a_stream_that_are_none_are_left_out(model: Model, gateway: Gateway) -> None:
    body = {"messages": CHAT, "stream": True, "stream_options": "all"}
    answer = httpx.post(f"{gateway.address}/v1/chat/completions", json=body, headers={"x-api-key": "key"})
    assert answer.status_code == 200


def test_a_client_that_hangs_up_while_it_waits_harms_no_other(
    model: Model, gateway: Gateway, openai_client: Any
) -> None:
    model.keeps = True
    body = json.dumps({"messages": CHAT})
    gone = http.client.HTTPConnection("127.0.0.1", gateway.port)
    gone.request("POST", "/v1/chat/completions", body, {"x-api-key": "key"})
    until(lambda: model.asked, "its question")
    assert model.caller.num_waiting == 1
    gone.close()
    model.keeps = False
    assert openai_client.chat.completions.create(model=MODEL, messages=CHAT).choices[0].message.content
    model.answer(model.asked[0])
    until(lambda: model.caller.num_waiting == 0, "the end of its question")


def test_a_client_that_hangs_up_before_its_question_is_whole_asked_nothing(
    model: Model, gateway: Gateway, openai_client: Any
) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as gone:
        gone.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-api-key: key\r\ncontent-length: 99\r\n\r\n{")
        assert openai_client.models.list()
    until(lambda: model.refusals, "its end")
    assert model.refusals == ["the program hung up"]
    assert not model.asked


def test_a_question_whose_program_was_ended_while_it_came_is_not_its_successors(model: Model, gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as late:
        late.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-api-key: key\r\ncontent-length: 2\r\n\r\n{")
        httpx.get(f"{gateway.address}/v1/models")
        gateway.forget("key")
        late.sendall(b"}")
        assert late.recv(99).startswith(b"HTTP/1.1 401")
    assert not model.asked


def test_the_unix_socket_is_the_same_server(model: Model, gateway: Gateway) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(gateway.socket))) as client:
        body = {"messages": CHAT}
        answer = client.post("http://any/v1/messages", json=body, headers={"x-api-key": "key"})
    assert answer.json()["content"][0]["text"] == "In the den."


@pytest.mark.parametrize("reward", [1, 0.5, "0.25", -3])
def test_a_reward_is_taken(model: Model, gateway: Gateway, reward: Any) -> None:
    headers = {"authorization": "Bearer key"}
    assert httpx.post(f"{gateway.address}/v1/reward", json={"reward": reward}, headers=headers).status_code == 200
    assert model.caller.reward == reward


@pytest.mark.parametrize("reward", [None, "good", True, [1], "nan", "inf"])
def test_a_reward_that_is_no_number_is_refused(model: Model, gateway: Gateway, reward: Any) -> None:
    headers = {"authorization": "Bearer key"}
    answer = httpx.post(f"{gateway.address}/v1/reward", json={"reward": reward}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"reward: {reward!r}; accepted: a finite number"


def test_a_reward_of_an_unknown_key_is_refused(gateway: Gateway) -> None:
    assert httpx.post(f"{gateway.address}/v1/reward", json={"reward": 1}).status_code == 401


def test_close_leaves_no_thread_and_no_address(tmp_path: Path) -> None:
    gateway = Gateway(MODEL, tmp_path)
    model = Model()
    model.keeps = True
    gateway.register("key", model.caller)
    waiting = http.client.HTTPConnection("127.0.0.1", gateway.port)
    waiting.request("POST", "/v1/messages", json.dumps({"messages": CHAT}), {"x-api-key": "key"})
    until(lambda: model.asked, "its question")
    model.asked[0].answer.set_exception(SessionOverError("the session is over"))
    gateway.close()
    waiting.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", gateway.port))


def test_without_the_extra_a_user_reads_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "rlmux.rl.agents.gateway")
    with pytest.raises(UserError, match=r"task: programs need uvicorn; install it with: pip install 'rlmux\[agents\]'"):
        importlib.import_module("rlmux.rl.agents.gateway")
