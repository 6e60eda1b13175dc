"""Agents' own clients against a server: what is sampled, by which names, and what is refused."""

from __future__ import annotations

import httpx
import openai
import pytest

CHAT = [{"role": "user", "content": "Say 7."}]


@pytest.fixture
def agent(request):
    def make(served, key: str = "tml-test") -> openai.OpenAI:
        base_url = f"{served.url.removesuffix('/tinker')}/v1"
        client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=httpx.Client(timeout=60))
        request.addfinalizer(client.close)
        return client

    return make


def test_the_openai_client_samples_from_base_models_checkpoints_and_samplers(serve, connect, agent):
    served = serve()
    client, openai_client = connect(served), agent(served)
    wanted = {"max_tokens": 12, "seed": 5}

    def complete(model: str, **options: object):
        return openai_client.completions.create(model=model, prompt="Say 7.", **{**wanted, **options})

    base = complete("rlmux/tiny", n=2, logprobs=1)
    assert base.choices[0].text != base.choices[1].text
    assert base.usage.completion_tokens == 24
    assert len(base.choices[0].logprobs.token_logprobs) == 12
    assert complete("rlmux/tiny").choices[0].text == base.choices[0].text, "a seed names its samples"

    model = client.model(client.ask("create_session", sdk_version="0")["session_id"])
    client.train(model, 1, seed=1)
    kept = client.ask("save_weights_for_sampler", model_id=model, seq_id=3, path="kept")
    live = client.ask("save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=0)
    path = client.result(kept["request_id"]).json()["path"]
    sampler = client.result(live["request_id"]).json()["sampling_session_id"]
    assert [each.id for each in openai_client.models.list()] == ["rlmux/tiny", path, sampler]
    trained = complete(path).choices[0].text
    assert trained == complete(sampler).choices[0].text
    assert trained != base.choices[0].text

    stopped = complete(path, stop=[trained[3]])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (trained[: trained.index(trained[3])], "stop")
    chat = {"model": path, "messages": CHAT, "max_completion_tokens": 12, "seed": 5}
    said = openai_client.chat.completions.create(**chat, logprobs=True)
    assert said.choices[0].finish_reason == "length"
    assert "".join(each.token for each in said.choices[0].logprobs.content) == said.choices[0].message.content
    chunks = list(openai_client.chat.completions.create(**chat, stream=True))
    assert [each.choices[0].delta.content for each in chunks] == [said.choices[0].message.content]

    check_tokens(served, path, said, openai_client, chat)
    check_refusals(openai_client, agent(served, "tml-other"), path)
    assert served.stop() == 0


def check_tokens(served, path: str, said, openai_client: openai.OpenAI, chat: dict) -> None:
    """Tokens in, tokens out: what a chat is made of gives the same tokens."""
    told = openai_client.chat.completions.create(**chat, extra_body={"return_token_ids": True}).choices[0]
    asked = {"model": path, "token_ids": told.prompt_token_ids, "sampling_params": {"max_tokens": 12, "seed": 5}}
    url = served.url.removesuffix("/tinker") + "/inference/v1/generate"
    answer = httpx.post(url, json=asked, headers={"Authorization": "Bearer tml-test"}, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == told.token_ids
    found = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
    assert found == [each.logprob for each in said.choices[0].logprobs.content]


def check_refusals(openai_client: openai.OpenAI, other: openai.OpenAI, path: str) -> None:
    for client, model, options, text in (
        (openai_client, "org/no", {}, "accepted: rlmux/tiny, the path of a checkpoint"),
        (other, path, {}, "no checkpoint"),
        (openai_client, path, {"top_p": 0.5}, "top_p is not served: leave it out"),
        (openai_client, path, {"max_tokens": 1000}, "max_tokens: 1000; accepted: 1 to 64"),
        (openai_client, path, {"prompt": []}, "prompt"),
        (openai_client, path, {"prompt": "naïve"}, "is not in the built-in vocabulary"),
    ):
        with pytest.raises(openai.APIStatusError, match=text):
            client.completions.create(**{"model": model, "prompt": "Say 7.", **options})
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools is not served"):
        openai_client.chat.completions.create(model=path, messages=CHAT, tools=tools)
