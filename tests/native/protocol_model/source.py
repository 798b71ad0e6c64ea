"""The text of `csrc`: its functions, and the order and scope of its memory verbs."""

from __future__ import annotations

import pathlib
import re

from .notation import access_of
from .program import Access

CSRC = pathlib.Path(__file__).resolve().parents[3] / "csrc"

MEMORY = "gpu/cuda/memory.cuh"


class SourceError(ValueError):
    """The sources say something that the model has no words for."""


class Sources:
    """The text of `csrc`, or of a variant of it that `edited` makes."""

    def __init__(self, texts: dict[str, str] | None = None) -> None:
        self._texts = texts or {
            str(p.relative_to(CSRC)): re.sub(r"//[^\n]*", "", p.read_text())
            for p in sorted(CSRC.rglob("*"))
            if p.suffix in {".h", ".cuh", ".cu", ".cpp"}
        }

    def __getitem__(self, path: str) -> str:
        return self._texts[path]

    def edited(self, *edits: tuple[str, str, str]) -> Sources:
        """With each `old` of (path, old, new), which must be there, replaced."""
        texts = dict(self._texts)
        for path, old, new in edits:
            if old not in texts[path]:
                raise SourceError(f"{path} has no {old!r}")
            texts[path] = texts[path].replace(old, new)
        return Sources(texts)

    def overloads(self, path: str, name: str, after: str = "") -> list[str]:
        """The bodies of the functions of a name that are behind the text `after`."""
        text = self[path]
        start = text.find(after)
        definition = re.compile(rf"\b{name}\([^;{{}}]*\)[^;{{}}]*\{{")
        found = list(definition.finditer(text, start)) if start >= 0 else []
        if not found:
            raise SourceError(f"{path} has no function {name}")
        return [block(text, match.end() - 1) for match in found]

    def function(self, path: str, name: str, after: str = "") -> str:
        """The first of them."""
        return self.overloads(path, name, after)[0]

    def one(self, path: str, pattern: str) -> re.Match[str]:
        """The only match of `pattern` in a file, in which a blank is any white space."""
        found = list(re.finditer(pattern.replace(" ", r"\s+"), self[path]))
        if len(found) != 1:
            raise SourceError(f"{path} has {len(found)} of {pattern!r}, expected one")
        return found[0]


def block(text: str, start: int, pair: str = "{}") -> str:
    """What stands between the bracket at `start` and the one that closes it."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return text[start + 1 : at]
    raise SourceError("a bracket is not closed")


# ---- verbs ---------------------------------------------------------------------------------------


def verbs(sources: Sources) -> dict[tuple[str, str], Access]:
    """(Function of memory.cuh, type of its PTX) to the order and scope of that PTX."""
    found = {}
    text = sources[MEMORY]
    for match in re.finditer(r"__device__ __forceinline__ \w+ (\w+)\([^)]*\) \{", text):
        body = block(text, match.end() - 1)
        ptx = re.search(
            r'"(?:st|ld|fence)(?:\.(weak|relaxed|release|acquire|acq_rel|sc))?'
            r"(?:\.(cta|gpu|sys))?(?:\.global\.(?:L2::cache_hint\.)?([\w.]+))?[ ;]",
            body,
        )
        if ptx is None:
            continue
        verb, access = (match[1], ptx[3] or ""), access_of(ptx[1], ptx[2])
        if found.setdefault(verb, access) != access:
            raise SourceError(f"{MEMORY} has two {match[1]} of {ptx[3]} that are not alike")
    return found
