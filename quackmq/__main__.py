"""Run `python -m quackmq` as the command `quackmq`, also if the script is not on the path."""

from __future__ import annotations

import sys

from quackmq.cli.entry import main

sys.exit(main())
