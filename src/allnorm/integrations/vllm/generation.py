"""Which compiled code of earlier starts may be used again: that of starts in which all went well.

vLLM keeps a compile cache for each rank. If one rank of an earlier start was interrupted, or a
graph was agreed to run unfused in it, what lies in the caches of the ranks need not fit together.
So a word is part of the caches' keys, and it is written down, by the rank that speaks for its
group, once an engine is ready and no graph was left unfused by a verdict. A start takes the word
away and, if it gets as far, puts it back: what was interrupted is not built upon. Without a word
all ranks compile everything, under a new one.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import uuid
from typing import Any


def place_of(vllm_config: Any, group: Any) -> pathlib.Path:
    """Where the word of this engine is: below vLLM's own caches, so that it goes with them."""
    from vllm import envs

    # Before there is a communicator: otherwise the word would be part of its own place.
    traits = (
        vllm_config.compute_hash(),
        list(group.ranks),
        vllm_config.parallel_config.data_parallel_rank,
    )
    name = hashlib.sha256(repr(traits).encode()).hexdigest()[:16]
    return pathlib.Path(envs.VLLM_CACHE_ROOT) / "allnorm" / name


def take(place: pathlib.Path) -> str:
    """Returns the word, which is then gone; a new one if there is none or it cannot be taken away."""
    try:
        word = place.read_text(encoding="ascii")
        place.unlink()
    except (OSError, UnicodeError):
        word = ""
    return word if re.fullmatch("[0-9a-f]{32}", word) else uuid.uuid4().hex


def put_back(place: pathlib.Path, word: str) -> None:
    """Writes the word down.

    Raises:
        OSError: it cannot be written; the next start compiles anew.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(word, encoding="ascii")
