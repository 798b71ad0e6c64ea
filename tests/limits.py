"""How long a test waits for something that does not end.

Such a limit guards against hangs. It says nothing about speed, so it bears a machine that is ten
times slower, or as loaded. What a test claims about time it measures and compares itself.
"""

HANG_SECONDS = 1200.0
"""For ranks and processes that a test starts; pytest's own limit, in pyproject.toml, is longer."""
