"""Reuses compiled code only from earlier starts in which all ranks succeeded.

vLLM keeps a compile cache per rank. If a rank was interrupted in an earlier start, or a verdict
left a graph unfused, the code in different ranks' caches may not match. Therefore the cache keys
contain a random word. One rank of the group stores the word in a file once the engine is ready
and no verdict left a graph unfused. Each start removes the file, and writes it again when the start
has succeeded. Without a file, all ranks use a new word and recompile everything.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import uuid
from typing import Any


def place_of(vllm_config: Any, group: Any) -> pathlib.Path:
    """Returns the path of the word's file: in vLLM's cache, so it is deleted with the cache."""
    from vllm import envs

    # Called before the communicator exists, because compute_hash() later depends on the word
    # itself.
    traits = (
        vllm_config.compute_hash(),
        list(group.ranks),
        vllm_config.parallel_config.data_parallel_rank,
    )
    name = hashlib.sha256(repr(traits).encode()).hexdigest()[:16]
    return pathlib.Path(envs.VLLM_CACHE_ROOT) / "allnorm" / name


def take(place: pathlib.Path) -> str:
    """Removes and returns the stored word; returns a new word if that is impossible."""
    try:
        word = place.read_text(encoding="ascii")
        place.unlink()
    except (OSError, UnicodeError):
        word = ""
    return word if re.fullmatch("[0-9a-f]{32}", word) else uuid.uuid4().hex


def put_back(place: pathlib.Path, word: str) -> None:
    """Stores the word for the next start. Raises OSError if the file cannot be written."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(word, encoding="ascii")
