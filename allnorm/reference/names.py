"""Names that calls take whose bits do not depend on them."""

from __future__ import annotations

ALGORITHMS = ("auto", "one_shot", "two_shot", "unfused")


def check_algorithm(algorithm: str) -> None:
    """Raises ValueError for an unknown name."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
