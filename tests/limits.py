"""The time limit of waits in tests.

The limit only guards against hangs. It must be long enough for a machine that is ten times slower,
or heavily loaded. A test that makes a claim about time must measure it.
"""

HANG_SECONDS = 1200.0
"""Limit for ranks and processes that a test starts; pytest's own limit, in pyproject.toml, is
longer."""
