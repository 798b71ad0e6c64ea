"""Lists the Pythons of this machine that the package supports, the oldest version first.

    python3 tools/pythons.py

A line for each version: its number and its interpreter. Looked for are `python3.N` on PATH and what
pyenv has installed.
"""

import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEWEST_MINOR = 20  # of those looked for


def oldest_minor() -> int:
    """N of the oldest Python 3.N that the package accepts."""
    text = (ROOT / "pyproject.toml").read_text()
    return int(re.search(r'^requires-python = ">=3\.(\d+)"', text, re.MULTILINE).group(1))


def pyenv_versions() -> list[pathlib.Path]:
    """The interpreters that pyenv has installed."""
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return []
    root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout
    return sorted(pathlib.Path(root.strip(), "versions").glob("3.*/bin/python"))


def runs(path: str, minor: int) -> bool:
    """Whether it is a CPython of that version: a shim may stand for one that is not there."""
    code = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    command = [path, "-I", "-c", code]
    # No variable of an outer environment decides which one answers.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYENV_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
    return done.stdout.split() == ["cpython", "3", str(minor)]


def pythons() -> dict[int, str]:
    """The first that runs of each minor version."""
    found = {}
    installed = pyenv_versions()
    for minor in range(oldest_minor(), NEWEST_MINOR):
        candidates = [shutil.which(f"python3.{minor}")]
        candidates += [str(p) for p in installed if p.match(f"3.{minor}.*/bin/python")]
        path = next((path for path in candidates if path and runs(path, minor)), None)
        if path:
            found[minor] = path
    return found


if __name__ == "__main__":
    for minor, path in pythons().items():
        print(f"3.{minor} {path}")
