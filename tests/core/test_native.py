"""Tests the commit that is built into the libraries."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

import allnorm
from allnorm.core import _native

ROOT = pathlib.Path(__file__).resolve().parents[2]
# CMake comes with the tools that build the package.
CMAKE = shutil.which(
    "cmake", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
)
needs_git = pytest.mark.skipif(not (shutil.which("git") and CMAKE), reason="needs git and cmake")


def git(folder: pathlib.Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def header_of(source: pathlib.Path, *more: str) -> str:
    """Returns the commit that a build of these sources would contain."""
    header = source.parent / "built_commit.h"
    script = ROOT / "cmake" / "commit.cmake"
    assert CMAKE is not None
    subprocess.run(
        [CMAKE, f"-DSOURCE={source}", f"-DHEADER={header}", *more, "-P", str(script)], check=True
    )
    return header.read_text().split('"')[1]


@needs_git
def test_a_build_contains_its_commit(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "checkout"
    (source / "csrc").mkdir(parents=True)
    (source / "csrc" / "a.cpp").write_text("one")
    assert header_of(source) == "", "built without git"
    assert header_of(source, "-DCOMMIT=1234") == "1234"
    git(source, "init", "--quiet")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "--message", "One")
    commit = git(source, "rev-parse", "HEAD")
    assert header_of(source) == commit
    (source / "notes.md").write_text("not built in")
    assert header_of(source) == commit
    (source / "csrc" / "b.cpp").write_text("two")
    assert header_of(source) == f"{commit}-dirty"
    assert header_of(source / "csrc") == "", "the repository of another project"


@pytest.mark.parametrize(
    ("commits", "commit", "dirty", "text"),
    [
        (["a" * 40, "a" * 40], "a" * 40, False, "a" * 12),
        (["a" * 40], "a" * 40, False, "a" * 12),
        (["a" * 40 + "-dirty"] * 2, "a" * 40, True, "a" * 12 + "-dirty"),
        (["a" * 40, "b" * 40], "b" * 40, True, "b" * 12 + "-dirty"),
        (["", ""], None, None, None),
    ],
)
def test_build_info(
    commits: list[str],
    commit: str | None,
    dirty: bool | None,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Built:
        def __init__(self, commit: str) -> None:
            self.commit = commit

        def build_info(self) -> dict[str, Any]:
            return {"version": "1.2.3", "commit": self.commit, "compiler": "gcc 12"}

    libraries = dict(zip(("cpu", "cuda"), map(Built, commits), strict=False))
    monkeypatch.setattr(_native, "available_backends", lambda: list(libraries))
    monkeypatch.setattr(_native, "library", libraries.__getitem__)
    info = allnorm.build_info()
    assert (info["version"], info["commit"], info["dirty"]) == ("1.2.3", commit, dirty)
    assert _native.built_commit() == text


def test_build_info_of_this_installation() -> None:
    info = allnorm.build_info()
    assert info["version"] == allnorm.__version__
    assert info["compiler"]
    assert info["commit"] is None or len(info["commit"]) == 40
