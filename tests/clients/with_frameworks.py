"""The official `openai` package, LangChain and LiteLLM against `semmoe up`: BASE_URL MODEL. run.py runs it in the environment it creates."""
import asyncio, importlib.metadata, os, sys

# Nothing is looked up online.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", LITELLM_TELEMETRY="False")
import litellm, openai
from langchain_openai import ChatOpenAI

base, model = sys.argv[1:]
ASK = [{"role": "user", "content": "Which rivers are long?"}]
SETTINGS = {"temperature": 0, "max_tokens": 24}


def official():
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60)
    assert model in [listed.id for listed in client.models.list()]
    whole = client.chat.completions.create(model=model, messages=ASK, **SETTINGS)
    assert whole.usage.completion_tokens == 24, whole
    events = list(client.chat.completions.create(model=model, messages=ASK, stream=True, stream_options={"include_usage": True}, **SETTINGS))
    assert events[-1].usage.completion_tokens == 24, events[-1]
    return whole.choices[0].message.content, [event.choices[0].delta.content or "" for event in events if event.choices]


def langchain():
    chat = ChatOpenAI(base_url=base, api_key="none", model=model, max_retries=0, timeout=60, stream_usage=True, **SETTINGS)
    whole = chat.invoke("Which rivers are long?")
    assert whole.usage_metadata["output_tokens"] == 24, whole
    pieces = list(chat.stream("Which rivers are long?"))
    assert any(piece.usage_metadata and piece.usage_metadata["output_tokens"] == 24 for piece in pieces), pieces
    assert asyncio.run(chat.ainvoke("Which rivers are long?")).content == whole.content
    return whole.content, [piece.content for piece in pieces]


def lite():
    ask = {"model": f"openai/{model}", "api_base": base, "api_key": "none", "messages": ASK, "num_retries": 0, "timeout": 60, **SETTINGS}
    whole = litellm.completion(**ask)
    assert whole.usage.completion_tokens == 24, whole
    pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(**ask, stream=True)]
    return whole.choices[0].message.content, pieces


texts = {}
for name, run in (("openai", official), ("langchain-openai", langchain), ("litellm", lite)):
    whole, pieces = run()
    assert whole and whole == "".join(pieces), f"{name}: {whole!r} in one piece, {pieces} as a stream"
    assert len([piece for piece in pieces if piece]) > 4, f"{name}: {pieces}"
    texts[name] = whole
    print(f"{name} {importlib.metadata.version(name)}: ok")
assert len(set(texts.values())) == 1, texts
