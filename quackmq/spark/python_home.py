"""Spark's home without the one thing in it that slows every Python process down.

Spark starts Python processes by the dozen: for each source and sink that is planned, for each
stream, on each machine. It puts `python/lib/pyspark.zip` of its home first on their path, which has
no compiled code: each of them compiles PySpark anew, 1.6 s of a processor instead of 0.4. Where
PySpark was installed by pip, the same code lies compiled beside it, and is found when the zip is
not. So a directory is made that has all of Spark's home but that.

Not promised: anything for a Spark that was not installed by pip, or for executors elsewhere.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_VARIABLE: Final = "SPARK_HOME"
_LEFT_OUT: Final = "python"


def use_compiled() -> None:
    """`SPARK_HOME` leads to such a directory from now on, for this process and those that it
    starts, unless somebody has set it."""
    if os.environ.get(_VARIABLE):
        return
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return
    installed = Path(spec.origin).parent
    if not (installed / "jars").is_dir():
        return
    home = Path(tempfile.mkdtemp(prefix="quackmq-spark-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for each in installed.iterdir():
        if each.name != _LEFT_OUT:
            (home / each.name).symlink_to(each)
    os.environ[_VARIABLE] = str(home)
