"""The document and the page, as they are served. Both are made when the first asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.docs_page import page
from quackmq.protocols.http.v1.openapi import document
from quackmq.protocols.http.v1.operations import Answer, Operation, answered

_TAG: Final = "document"
_HTML: Final = "text/html; charset=utf-8"
#: The page has nothing from elsewhere, and a browser is to see to it.
_HEADERS: Final = (
    ("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("x-content-type-options", "nosniff"),
)


def operations(offered: Iterable[Operation]) -> tuple[Operation, ...]:
    """Those that tell of the others, and of themselves."""
    documents = _Documents()
    own = (
        Operation(
            name="openapi",
            tag=_TAG,
            method="GET",
            path="/v1/openapi.json",
            handler=documents.openapi,
            about="This API as an OpenAPI document.",
            answers={200: Answer("The document.", schema={"type": "object"})},
        ),
        Operation(
            name="docs",
            tag=_TAG,
            method="GET",
            path="/v1/docs",
            handler=documents.docs,
            about="This API as a page for people.",
            answers={200: Answer("The page.", content_type="text/html", schema={"type": "string"})},
        ),
    )
    documents.all = (*offered, *own)
    return own


class _Documents:
    def __init__(self) -> None:
        self.all: tuple[Operation, ...] = ()

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self.all)

    @cached_property
    def _openapi(self) -> Response:
        return answered(200, self._document)

    @cached_property
    def _docs(self) -> Response:
        return Response(200, page(self._document).encode(), _HTML, _HEADERS)

    async def openapi(self, request: Request) -> Response:
        return self._openapi

    async def docs(self, request: Request) -> Response:
        return self._docs
