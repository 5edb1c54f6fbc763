"""The document and the page tell of every route, every parameter, every error, and of no other."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from quackmq.errors import QuackError
from quackmq.protocols.http import v1
from quackmq.protocols.http.errors import status_for
from quackmq.protocols.http.v1.openapi import TAGS, make_document
from tests.kit.tables import each
from tests.protocols.http.v1.serving import Client
from tests.protocols.kafka.test_errors import tree

DOCUMENT = make_document(v1.OPERATIONS)
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def test_the_served_document_tells_of_every_route_and_of_no_other(api: Client) -> None:
    served = api.get("/v1/openapi.json").json
    assert served == json.loads(json.dumps(DOCUMENT))
    assert served["openapi"].startswith("3.1.")
    assert set(OPERATIONS) == {(route.method, route.pattern) for route in v1.ROUTES}


@each("at", OPERATIONS)
def test_an_operation_tells_all_about_itself(at: tuple[str, str]) -> None:
    operation = OPERATIONS[at]
    parameters = operation.get("parameters", [])
    in_path = {each["name"] for each in parameters if each["in"] == "path"}
    assert in_path == set(re.findall(r"{(\w+)}", at[1]))
    assert all(each["description"] and each["schema"] for each in parameters)
    assert operation["summary"] and operation["operationId"]
    assert set(operation["tags"]) <= set(TAGS)
    assert min(operation["responses"]) < "300"
    assert "requestBody" not in operation or at[0] in ("POST", "PUT", "PATCH")


def test_names_of_operations_are_their_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def test_errors_are_told_with_the_status_that_they_have() -> None:
    statuses = {kind.code: status_for(kind) for kind in tree(QuackError)}
    statuses["unsupported_media_type"] = 415
    for operation in OPERATIONS.values():
        for status, answer in operation["responses"].items():
            if status >= "400":
                for code in answer["description"].partition(": ")[2].split(", "):
                    assert statuses[code] == int(status)


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(DOCUMENT)
    shapes = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert shapes <= set(DOCUMENT["components"]["schemas"])
    assert set(DOCUMENT["components"]["schemas"]) <= shapes, "a shape that nobody speaks of"


class Page(HTMLParser):
    """What a browser would make of it: tags in pairs, ids, links, text."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if named.get("id"):
            self.ids.append(str(named["id"]))
        assert not {"src", "srcset", "onclick", "action"} & set(named)
        if "href" in named:
            self.links.append(str(named["href"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def test_the_page_shows_every_operation_and_parameter(api: Client) -> None:
    answer = api.get("/v1/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = page_of(answer.body.decode())
    for (method, path), operation in OPERATIONS.items():
        assert method in page.text and path in page.text
        assert operation["operationId"] in page.ids
        assert all(each["name"] in page.text for each in operation.get("parameters", []))
    assert set(DOCUMENT["components"]["schemas"]) <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)


def test_the_page_needs_nothing_from_elsewhere(api: Client) -> None:
    answer = api.get("/v1/docs")
    page = page_of(answer.body.decode())
    assert not page.tags & {"script", "link", "img", "iframe", "form", "object", "embed"}
    inside = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inside <= set(page.ids)
    assert [link for link in page.links if not link.startswith("#")] == ["/v1/openapi.json"]
    assert "url(" not in answer.body.decode() and "@import" not in answer.body.decode()
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_what_is_not_there_is_told_as_a_problem(api: Client) -> None:
    api.get("/v1/nothing").problem(404, "unknown_route")
    answer = api.ask("PUT", "/v1/topics", {})
    answer.problem(405, "unknown_method")
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))
