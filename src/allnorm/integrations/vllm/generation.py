"""Decides which compiled code of earlier starts is reused: that of starts that were successful.

vLLM keeps a compile cache per rank. If a rank of an earlier start was interrupted, or a verdict
left a graph unfused, the cached code of different ranks may not fit together. Therefore a word is
part of the cache keys. One rank of the group stores the word in a file once the engine is ready and
no verdict left a graph unfused. Each start removes the word and stores it again when it succeeds,
so code of an interrupted start is never reused. Without a word, all ranks compile everything with a
new one.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import uuid
from typing import Any


def place_of(vllm_config: Any, group: Any) -> pathlib.Path:
    """Returns the word's file, inside vLLM's cache, so that deleting the cache deletes it too."""
    from vllm import envs

    # Called before the communicator exists: afterwards compute_hash() depends on the word itself.
    traits = (
        vllm_config.compute_hash(),
        list(group.ranks),
        vllm_config.parallel_config.data_parallel_rank,
    )
    name = hashlib.sha256(repr(traits).encode()).hexdigest()[:16]
    return pathlib.Path(envs.VLLM_CACHE_ROOT) / "allnorm" / name


def take(place: pathlib.Path) -> str:
    """Removes and returns the stored word; a new word if there is none or it cannot be removed."""
    try:
        word = place.read_text(encoding="ascii")
        place.unlink()
    except (OSError, UnicodeError):
        word = ""
    return word if re.fullmatch("[0-9a-f]{32}", word) else uuid.uuid4().hex


def put_back(place: pathlib.Path, word: str) -> None:
    """Stores the word.

    Raises:
        OSError: it cannot be written; the next start compiles everything again.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(word, encoding="ascii")
