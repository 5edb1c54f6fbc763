"""QuackMQ: a broker whose topics are logs, and which acknowledges only what is on disk.

Names listed in `__all__` are public and kept stable. Everything else may move; programs talk to a
broker through one of its doors, so they rarely need more than the errors.
"""

from __future__ import annotations

from quackmq.errors import QuackError

__version__ = "0.1.0"

__all__ = ["QuackError", "__version__"]
