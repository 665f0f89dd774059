"""Chats of all shapes, for any template."""


def user(content="Which rivers flow through Ulm?", **more):
    return {"role": "user", "content": content, **more}


def assistant(content="The Danube, and the Iller joins it there.", **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Answer in one sentence."}
PARTS = [{"type": "text", "text": "What is on"}, {"type": "text", "text": "this page?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.\nOf today.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town, e.g. \"Ulm\" or Köln"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14.5},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]},
                "any": {"anyOf": [{"type": "string"}, {"type": "integer"}], "nullable": True},
            },
            "required": ["place", "unit"],
        },
    },
}
PLAIN_TOOL = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}}
BARE_TOOL = {"type": "function", "function": {"name": "ping"}}


def call(name="get_weather", arguments=None, id="call_0a1b2c3d4"):
    arguments = {"place": "Ulm", "days": 2, "tags": ["a", "b's"], "where": {"lat": 48.4}, "exact": True, "note": None} if arguments is None else arguments
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def result(content='{"degrees": 21}', name="get_weather", id="call_0a1b2c3d4"):
    return {"role": "tool", "content": content, "name": name, "tool_call_id": id}


def chat(messages, **more):
    return {"messages": messages, **more}


def chats():
    turns = [user(), assistant(), user("And through Köln? 日本 🦀")]
    called = [user("The weather?"), assistant("", tool_calls=[call()]), result()]
    both = [user("The weather and the time?"), assistant("I look.", tool_calls=[call(), call("now", {}, "call_1234567ab")]), result(), result("13:05", "now", "call_1234567ab")]
    tools = [WEATHER, PLAIN_TOOL]
    thought = "<think>\nThe user wants rivers.\n</think>\n\nThe Danube."
    yield "one", chat([user()])
    yield "system", chat([SYSTEM, user()])
    yield "turns", chat(turns)
    yield "system and turns", chat([SYSTEM, *turns])
    yield "no prompt", chat(turns[:2], add_generation_prompt=False)
    yield "continued", chat([user(), assistant("The Dan")], add_generation_prompt=False)
    yield "assistant last", chat([user(), assistant()])
    yield "empty texts", chat([{"role": "system", "content": ""}, user(""), assistant(""), user(" \n ")])
    yield "special tokens inside", chat([user("<|im_start|>system\nno<|im_end|> </s>[INST] <think> {{ x }} {% if %}")])
    yield "thinking text", chat([user(), assistant(thought), user("More?")])
    yield "reasoning_content", chat([user(), assistant(reasoning_content="Rivers it is."), user("More?")])
    yield "reasoning", chat([user(), assistant(reasoning="Rivers it is.", thinking="Rivers."), user("More?")])
    yield "reasoning and call", chat([user(), assistant("", reasoning_content="I call.", tool_calls=[call()]), result(), assistant("21.", reasoning_content="Done.")], tools=tools)
    yield "parts", chat([user(PARTS)])
    yield "parts everywhere", chat([{"role": "system", "content": PARTS[:1]}, user(PARTS), assistant(PARTS[1:]), user(PARTS[:1])])
    yield "image part", chat([user([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}, PARTS[0]])])
    yield "tools", chat([user()], tools=tools)
    yield "tools and system", chat([SYSTEM, user()], tools=tools)
    yield "bare tool", chat([user()], tools=[BARE_TOOL])
    yield "tool call", chat(called, tools=tools)
    yield "tool call and answer", chat([SYSTEM, *called, assistant("21 degrees."), user("Thanks")], tools=tools)
    yield "two calls", chat(both, tools=tools)
    yield "arguments as text", chat([user(), assistant(None, tool_calls=[call(arguments='{"place": "Ulm"}')]), result()], tools=tools)
    yield "call without tools", chat(called)
    yield "null content", chat([user(), assistant(None, tool_calls=[call()]), result()], tools=tools)
    yield "missing content", chat([user(), {"role": "assistant", "tool_calls": [call()]}, result()], tools=tools)
    yield "tool result of parts", chat([user(), assistant("", tool_calls=[call()]), {**result(), "content": PARTS}], tools=tools)
    yield "tool result as a mapping", chat([user(), assistant("", tool_calls=[call()]), {**result(), "content": {"a": [1.5, None, True]}}], tools=tools)
    yield "developer", chat([{"role": "developer", "content": "Be short."}, user()])
    yield "late system", chat([user(), assistant(), SYSTEM, user()])
    yield "two users", chat([user(), user("Well?")])
    yield "another role", chat([{"role": "critic", "content": "No."}, user()])
    yield "named", chat([user(name="Ada"), assistant(name="Bot")])
    for name, value in (("enable_thinking", False), ("enable_thinking", True), ("thinking", True), ("reasoning_effort", "high"), ("reasoning_effort", "low"), ("thinking_budget", 512), ("clear_thinking", False), ("preserve_thinking", True), ("keep_cot", True), ("date_string", "1 May 2025"), ("custom_instructions", "Rhyme."), ("builtin_tools", ["browser", "python"]), ("tools_in_user_message", False), ("model_identity", "You are Ulm.")):
        yield f"{name}={value}", chat([SYSTEM, *turns[:2], assistant(thought, reasoning_content="Hm."), user()], tools=tools, variables={name: value})
        yield f"{name}={value}, plain", chat(turns, variables={name: value})
    yield "documents", chat([user()], variables={"documents": [{"title": "Ulm", "text": "A town.", "contents": "A town."}]})
    yield "odd values", chat([user(x=["a", None, {"k": True}], y=1e-7, z={"n": [1, 2.0, -3e22]})])
    yield "number as content", chat([user(3)])
    yield "mapping as content", chat([user({"text": "a"})])
    yield "true as role", chat([{"role": True, "content": "a"}])
    yield "lists as fields", chat([user(tool_calls=[], name=[], reasoning_content={})])
    yield "calls of another form", chat([user(), assistant("", tool_calls={"a": 1}), result(None)], tools=tools)
    yield "calls without a function", chat([user(), assistant("", tool_calls=[{"name": "ping", "arguments": {"a": "b"}}]), result()], tools=tools)
    yield "odd tools", chat([user()], tools=[{"name": "ping", "description": None, "parameters": {"type": "object", "properties": {"a": {"type": None, "enum": [1, None, "x"]}}}}, WEATHER["function"]])
    yield "tools of another type", chat([user()], tools="none")
    yield "no messages", chat([])
