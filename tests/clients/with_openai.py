"""The official `openai` package against a gateway: BASE_URL KEY. run.py runs it in the environment it creates."""
import asyncio, sys

import openai

base, key = sys.argv[1:]
MODEL = "qwen3-30b"
ASK = [{"role": "user", "content": "What is Rust?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
client = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=30)


def expect(kind, call, says):
    try:
        call()
    except kind as error:
        assert says in str(error), error
        assert error.request_id, "every answer names its request"
        return error
    raise AssertionError(f"expected {kind.__name__}")


# Models.
assert [model.id for model in client.models.list()] == [MODEL, "small"]
assert [client.models.retrieve(name).id for name in (MODEL, "small")] == [MODEL, "small"]

# Chat, in one piece and as a stream, also by an alias.
for name in (MODEL, "small"):
    answer = client.chat.completions.create(model=name, messages=ASK)
    assert answer.choices[0].message.content == "Rust is a language.", answer
    assert answer.usage.completion_tokens == 5
raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, extra_headers={"X-Request-Id": "mine"})
assert raw.headers["x-request-id"] == "mine" and raw.headers["x-semmoe-backend"] == "pod-a", raw.headers
stream = client.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True})
events = list(stream)
assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "Rust is a language."
assert events[-1].usage.completion_tokens == 5, events[-1]

# Tools, both ways.
answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS)
assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Bern"}', answer
events = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, stream=True)
calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
assert calls[0].function.name == "weather"
assert "".join(call.function.arguments for call in calls) == '{"city": "Bern"}', calls

# Embeddings.
assert client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float").data[1].embedding == [0.5, -0.5]

# Errors: the engine's own words, and the gateway's.
error = expect(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=ASK, temperature=9), "out of range")
assert error.param == "temperature"
expect(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-none", messages=ASK), "there is no model 'gpt-none'")
error = expect(openai.NotFoundError, lambda: client.models.retrieve("gpt-none"), "there is no model 'gpt-none'")
assert error.code == "model_not_found"
expect(openai.NotFoundError, lambda: client.files.list(), "there is no route GET /v1/files")
wrong = openai.OpenAI(base_url=base, api_key="sk-of-a-stranger", max_retries=0)
error = expect(openai.AuthenticationError, lambda: wrong.chat.completions.create(model=MODEL, messages=ASK), "not valid for this gateway")
assert error.code == "invalid_api_key" and "stranger" not in str(error)
expect(openai.AuthenticationError, lambda: wrong.models.list(), "not valid for this gateway")


async def many():
    """A stream that is abandoned early, among others that are not."""
    asynchronous = openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)

    async def one(early):
        text = ""
        async with await asynchronous.chat.completions.create(model=MODEL, messages=ASK, stream=True) as events:
            async for event in events:
                text += event.choices[0].delta.content or ""
                if early:
                    return
        assert text == "Rust is a language.", text

    await asyncio.gather(*(one(at % 3 == 0) for at in range(30)))


asyncio.run(many())
print(f"openai {openai.__version__}: ok")
