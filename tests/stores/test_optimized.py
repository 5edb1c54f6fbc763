"""The store keeps its promises under `python -O`, which removes every `assert` of the product.

pytest rewrites the asserts of tests, and of the helpers named in tests/conftest.py, so these stay.
The first test of the inner run proves it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CANARY = """
import pytest
from tests.stores.optimized import holds

def test_asserts_are_executed_here_and_in_helpers_and_nowhere_else() -> None:
    assert not __debug__
    with pytest.raises(AssertionError):
        assert holds(False)
    with pytest.raises(AssertionError):
        holds(True, wanted=False)
"""
#: The engine, what it writes and how it is recovered; of the contract, the store with small limits.
FILES = [
    *("test_gathering.py", "test_changes.py", "test_journal.py", "test_format.py"),
    *("test_recovery.py", "test_quick_cycles.py", "test_tail.py"),
]
CONTRACT = ["test_contract_append.py", "test_contract_restart.py"]
SEEDS = 15


def run_optimized(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-O", "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.processes
def test_the_tests_of_the_engine_pass_without_the_asserts_of_the_product(tmp_path: Path) -> None:
    canary = tmp_path / "test_canary.py"
    canary.write_text(CANARY)
    stores = ROOT / "tests" / "stores"
    done = run_optimized(
        *("pytest", "-q", "-x", "-pno:cacheprovider", "-c", str(ROOT / "pyproject.toml")),
        # That asserts outside of tests are not executed is why this test is here.
        *("-W", "ignore:assertions not in test modules:pytest.PytestConfigWarning"),
        *("-k", "not contract or (small and not reopened)", str(canary)),
        str(ROOT / "tests" / "disk" / "test_linux_aio.py"),
        *(str(stores / "local" / name) for name in FILES),
        *(str(stores / name) for name in CONTRACT),
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-1_000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.processes
def test_the_simulation_breaks_no_promise_without_the_asserts_of_the_product() -> None:
    done = run_optimized("tests.simulation.soak", "--seed", "1", "--seeds", str(SEEDS))
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-1_000:]
    assert f"{SEEDS} seeds, no promise broken" in done.stdout
