"""Spark looks for modules of this kind of name and registers what it finds: `format("quackmq")` is
known in every session, without a line of code."""

from quackmq.spark.source.source import QuackSource as DefaultSource

__all__ = ["DefaultSource"]
