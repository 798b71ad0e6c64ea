"""Properties of the machine and of the running source."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from allnorm import topology

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: pathlib.Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def package_in(folder: pathlib.Path, text: str) -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / "topology.py").write_text(text)
    return folder


@pytest.mark.parametrize("installed", [False, True])
def test_the_commit_of_the_running_source(
    installed: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    package = package_in(checkout / "src" / "allnorm", "one\n")
    git(checkout, "init", "--quiet")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "One")
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    monkeypatch.chdir(tmp_path)
    if installed:
        package = package_in(tmp_path / "site-packages" / "allnorm", "one\n")
    monkeypatch.setattr(topology, "__file__", str(package / "topology.py"))
    found = topology.source_commit.__wrapped__
    assert found() == (None if installed else commit)
    monkeypatch.chdir(checkout)
    assert found() == commit
    (package / "topology.py").write_text("two\n")
    assert found() == (None if installed else f"{commit}-dirty")
