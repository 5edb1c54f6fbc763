"""Render the API's document as an HTML page for people. Pure.

The page is one file without scripts and without external resources, so it works behind any
firewall.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from html import escape
from typing import Any, Final

from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.openapi import make_document
from quackmq.protocols.http.v1.operations import Operation, ResponseInfo, json_response

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --code: #0a7; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1 small { font-size: 1rem; font-weight: normal; }
h2 { border-bottom: 1px solid var(--line); margin-top: 2.5rem; }
code, pre { font: 0.9em/1.4 ui-monospace, monospace; }
pre { background: var(--soft); overflow-x: auto; padding: 0.75rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; padding: 0 0.75rem; }
summary { cursor: pointer; padding: 0.5rem 0; }
summary b { display: inline-block; min-width: 4.5rem; color: var(--code); }
summary span { color: GrayText; }
table { border-collapse: collapse; width: 100%; }
th, td { border-top: 1px solid var(--line); padding: 0.3rem 0.5rem; text-align: left;
         vertical-align: top; }
nav a { margin-right: 1rem; }
"""
_METHODS: Final = ("get", "post", "put", "patch", "delete")


def render_page(document: Mapping[str, Any]) -> str:
    return "\n".join(_render_page(document))


def _render_page(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page: the head, the operations by tag, and all schemas."""
    info = document["info"]
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(info['title'])} API <small>{escape(info['version'])}</small></h1>"
    yield f"<p>{_render_prose(info['description'])}</p>"
    yield '<p>For programs: <a href="/v1/openapi.json">openapi.json</a></p><nav>'
    tags = document["tags"]
    yield from (
        f'<a href="#tag-{escape(each["name"])}">{escape(each["name"])}</a>' for each in tags
    )
    yield '<a href="#shapes">shapes</a></nav><main>'
    for tag in tags:
        yield f'<h2 id="tag-{escape(tag["name"])}">{escape(tag["name"].capitalize())}</h2>'
        yield f"<p>{_render_prose(tag['description'])}</p>"
        for method, path, operation in _operations_of_tag(document, tag["name"]):
            yield from _render_operation(method, path, operation)
    yield '<h2 id="shapes">Shapes</h2>'
    for name, schema in document["components"]["schemas"].items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        yield f"<span>{_render_prose(schema.get('description', ''))}</span></summary>"
        yield f"<pre>{escape(json.dumps(schema, indent=2))}</pre></details>"
    yield "</main></body></html>"


def _operations_of_tag(
    document: Mapping[str, Any], tag: str
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield method, path and description of the operations with a tag, in the order of the
    document.
    """
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods and tag in methods[method]["tags"]:
                yield method, path, methods[method]


def _render_operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one operation: its parameters, its body and its responses."""
    yield f'<details id="{escape(operation["operationId"])}"><summary><b>{method.upper()}</b> '
    yield f"<code>{escape(path)}</code> "
    yield f"<span>{_render_prose(operation['summary'])}</span></summary>"
    yield f"<p>{_render_prose(operation['description'])}</p>"
    parameters = operation.get("parameters", ())
    if parameters:
        yield "<table><tr><th>parameter</th><th>in</th><th>allowed values</th><th></th></tr>"
        for each in parameters:
            required = " (required)" if each["required"] else ""
            yield f"<tr><td><code>{escape(each['name'])}</code>{required}</td><td>{each['in']}</td>"
            yield f"<td>{escape(_describe_bounds(each['schema']))}</td>"
            yield f"<td>{_render_prose(each['description'])}</td></tr>"
        yield "</table>"
    if "requestBody" in operation:
        body = operation["requestBody"]
        yield f"<p>Body: {_render_prose(body['description'])}</p><ul>"
        for content_type, content in body["content"].items():
            links = _render_schema_links(content["schema"])
            yield f"<li><code>{escape(content_type)}</code> {links}</li>"
        yield "</ul>"
    yield "<table><tr><th>response</th><th></th><th></th></tr>"
    for status, response in operation["responses"].items():
        contents = response.get("content", {}).values()
        links = ", ".join(_render_schema_links(content["schema"]) for content in contents)
        yield f"<tr><td>{status}</td><td>{_render_prose(response['description'])}</td>"
        yield f"<td>{links}</td></tr>"
    yield "</table></details>"


def _render_schema_links(schema: Mapping[str, Any]) -> str:
    """Render a schema as links to the shapes that it refers to."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    return " or ".join(_render_schema_links(each) for each in schema.get("anyOf", ()))


def _describe_bounds(schema: Mapping[str, Any]) -> str:
    """Return the values that a parameter's schema allows, and its default, as text."""
    if "enum" in schema:
        bounds = " or ".join(schema["enum"])
    elif schema["type"] == "integer":
        bounds = f"{schema['minimum']:,} to {schema['maximum']:,}"
    else:
        bounds = schema.get("pattern", "text")
    return f"{bounds}; default {schema['default']}" if "default" in schema else bounds


def _render_prose(text: str) -> str:
    """Render text in which backquotes mark code."""
    pieces = escape(text).split("`")
    # Every second piece stands between two backquotes.
    return "".join(
        f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces)
    )


# --- both documents, as operations ----------------------------------------------------------------


_TAG: Final = "document"
_HTML: Final = "text/html; charset=utf-8"
#: The page loads nothing from elsewhere, and the browser enforces this.
_HEADERS: Final = (
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("x-content-type-options", "nosniff"),
)


def document_operations(api_operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return the operations that serve the documents of all operations, including themselves."""
    documents = _Documents()
    own = (
        Operation(
            name="openapi",
            tag=_TAG,
            method="GET",
            path="/v1/openapi.json",
            handler=documents.openapi,
            description="This API as an OpenAPI document.",
            responses={200: ResponseInfo("The document.", schema={"type": "object"})},
        ),
        Operation(
            name="docs",
            tag=_TAG,
            method="GET",
            path="/v1/docs",
            handler=documents.docs,
            description="This API as a page for people.",
            responses={
                200: ResponseInfo("The page.", content_type="text/html", schema={"type": "string"})
            },
        ),
    )
    documents.all = (*api_operations, *own)
    return own


class _Documents:
    """The two documents, made on first use. `all` is set after construction, because it includes
    the two operations that serve the documents.
    """

    def __init__(self) -> None:
        self.all: tuple[Operation, ...] = ()

    @cached_property
    def _document(self) -> dict[str, Any]:
        return make_document(self.all)

    @cached_property
    def _openapi(self) -> Response:
        return json_response(200, self._document)

    @cached_property
    def _docs(self) -> Response:
        return Response(200, render_page(self._document).encode(), _HTML, _HEADERS)

    async def openapi(self, request: Request) -> Response:
        return self._openapi

    async def docs(self, request: Request) -> Response:
        return self._docs
