"""Provides `project.urls` of the package to scikit-build-core.

ALLNORM_REPOSITORY, the address of the repository, is known only to the one who publishes a build.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(field: str, settings: Mapping[str, Any], *_: Any) -> dict[str, str]:
    """Returns the links by name; none if ALLNORM_REPOSITORY is not set."""
    address = os.environ.get("ALLNORM_REPOSITORY", "").rstrip("/")
    if not address:
        return {}
    return {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
