"""Jinja2 as the `chat_template_utils` of Transformers sets it up, with a fixed clock."""
import datetime, json

import jinja2, jinja2.ext, jinja2.nodes, jinja2.sandbox, jinja2.utils

NOW = datetime.datetime(2024, 2, 29, 13, 5, 9)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Dict:
    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name, value):
        Namespace.check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals.update(raise_exception=raise_exception, strftime_now=NOW.strftime, dict=Dict(), namespace=Namespace)


def answers(requests):
    """The text of each request, or its error, under the most recent template."""
    template, special = None, {}
    for request in requests:
        if "template" in request:
            special = request.get("special", {})
            try:
                template = environment.from_string(request["template"])
            except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
                template = error
        yield answer(template, special, request)


def answer(template, special, request):
    if isinstance(template, Exception):
        return {"error": f"{type(template).__name__}: {template}"}
    variables = {**special, **request.get("variables", {})}
    try:
        text = template.render(
            messages=request["messages"],
            tools=request.get("tools") or None,
            documents=variables.pop("documents", None),
            add_generation_prompt=request.get("add_generation_prompt", True),
            **variables,
        )
        return {"text": text}
    except Exception as error:  # Whatever a template may raise.
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    import sys

    for text in answers(map(json.loads, sys.stdin)):
        print(json.dumps(text), flush=True)
