"""What goes wrong in a pipeline, as one sentence.

Spark tells of a failure in hundreds of lines: Java's stack, Python's, the plan of the query. What
the user can use is in one of them: our own error, raised in a process of Spark's, or the sentence
behind Spark's name for it.
"""

from __future__ import annotations

import re
from typing import Final

from quackmq import errors
from quackmq.errors import InvalidRequest, QuackError

#: A sentence, not a page: what is cut off is in Spark's log.
_LONGEST_CHARS: Final = 400

#: `quackmq.errors.UnknownTopic: there is no topic ducks`, at the end of a Python traceback.
_OURS: Final = re.compile(r"^\s*(?:\S+: )?quackmq\.[\w.]+\.(\w+): (.+)$", re.MULTILINE)
#: `[PARSE_SYNTAX_ERROR] Syntax error at or near 'of'. SQLSTATE: 42601 (line 1, pos 5)`
_CONDITION: Final = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_SQL_STATE: Final = re.compile(r"\s*SQLSTATE: \w+;?")
#: Errors of a query that was asked for, not of what it met: those that Spark's planner raises.
_OF_THE_REQUEST: Final = ("AnalysisException", "ParseException")


class NotInstalled(QuackError):
    """Something that Spark needs is not on this machine."""

    code = "not_installed"


class SparkFailed(QuackError):
    """Spark could not do what it was told, for a reason that is not ours."""

    code = "spark_failed"


class Stopped(QuackError):
    """A signal ended a pipeline that had not come to its end."""

    code = "stopped"


def in_short(failure: BaseException) -> QuackError:
    """The same failure as one sentence: our own error if one is behind it."""
    if isinstance(failure, QuackError):
        return failure
    text = str(failure)
    found = _OURS.findall(text)
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, SparkFailed)
        return _made(kind, message.strip())
    kind = InvalidRequest if type(failure).__name__ in _OF_THE_REQUEST else SparkFailed
    return _made(kind, _sentence(text) or type(failure).__name__)


def _made(kind: type[QuackError], message: str) -> QuackError:
    try:
        return kind(_cut(message))
    except TypeError:  # one that tells more than a sentence
        return SparkFailed(_cut(message))


def _sentence(text: str) -> str:
    """Spark's first line, without its name for the failure."""
    first = next((line for line in text.strip().splitlines() if line.strip()), "")
    return _SQL_STATE.sub("", _CONDITION.sub("", first)).strip()


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CHARS else text[:_LONGEST_CHARS].rstrip() + " …"
