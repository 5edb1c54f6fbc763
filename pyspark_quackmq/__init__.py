"""Register `format("quackmq")` in every Spark session, without a call of the program.

Spark imports installed modules named `pyspark_*` and registers the `DefaultSource` of each.
"""

from quackmq.spark.source.source import QuackSource as DefaultSource

__all__ = ["DefaultSource"]
