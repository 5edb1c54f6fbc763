"""Shorten the failure of a pipeline to an error of one sentence.

Spark reports a failure in hundreds of lines: Java's stack, Python's stack, the plan of the query.
One of these lines helps the user: our own error, raised in a process of Spark, or the sentence
after Spark's name for the error. This module finds that line.
"""

from __future__ import annotations

import re
from typing import Final

from quackmq import errors
from quackmq.errors import InvalidRequest, QuackError

#: The bound of a message: one sentence, not a page. Spark's log has the whole text.
_LONGEST_CHARS: Final = 400

#: `quackmq.errors.UnknownTopic: there is no topic ducks`, at the end of a Python traceback.
_OUR_ERROR: Final = re.compile(r"^\s*(?:\S+: )?quackmq\.[\w.]+\.(\w+): (.+)$", re.MULTILINE)
#: `[PARSE_SYNTAX_ERROR] Syntax error at or near 'of'. SQLSTATE: 42601 (line 1, pos 5)`
_CONDITION: Final = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_SQL_STATE: Final = re.compile(r"\s*SQLSTATE: \w+;?")
#: Errors that Spark's planner raises: the query itself is wrong, not the data it meets.
_REQUEST_ERRORS: Final = ("AnalysisException", "ParseException")


class NotInstalled(QuackError):
    """A program or package that Spark needs is not installed."""

    code = "not_installed"


class SparkFailed(QuackError):
    """Spark failed for a reason that is not an error of QuackMQ."""

    code = "spark_failed"


class Stopped(QuackError):
    """A signal stopped a pipeline before it was done."""

    code = "stopped"


def shorten_error(failure: BaseException) -> QuackError:
    """Return the failure as an error of one sentence: our own error if it is the cause, else
    InvalidRequest or SparkFailed."""
    if isinstance(failure, QuackError):
        return failure
    text = str(failure)
    our_errors = _OUR_ERROR.findall(text)
    if our_errors:
        name, message = our_errors[-1]
        error_class = getattr(errors, name, SparkFailed)
        return _make_error(error_class, message.strip())
    error_class = InvalidRequest if type(failure).__name__ in _REQUEST_ERRORS else SparkFailed
    return _make_error(error_class, _first_sentence(text) or type(failure).__name__)


def _make_error(error_class: type[QuackError], message: str) -> QuackError:
    try:
        return error_class(_truncate(message))
    except TypeError:  # its constructor needs more than a message
        return SparkFailed(_truncate(message))


def _first_sentence(text: str) -> str:
    """Return the first line of Spark's message, without the name of the error."""
    first = next((line for line in text.strip().splitlines() if line.strip()), "")
    return _SQL_STATE.sub("", _CONDITION.sub("", first)).strip()


def _truncate(text: str) -> str:
    return text if len(text) <= _LONGEST_CHARS else text[:_LONGEST_CHARS].rstrip() + " …"
