"""docs/kafka.md says what the code says."""

from __future__ import annotations

from tests.protocols.kafka.document import DOCUMENT, rewritten


def test_the_tables_of_the_document_are_those_of_the_code() -> None:
    document = DOCUMENT.read_text()
    assert rewritten(document) == document, "run `python -m tests.protocols.kafka.document`"
