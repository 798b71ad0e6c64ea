"""Lists this machine's Python versions that the package supports, oldest first.

    python3 tools/pythons.py

Prints a line per version: its number and its interpreter. It looks for `python3.N` on PATH and for
the versions that pyenv has installed.
"""

import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEWEST_MINOR = 20  # end of the search range


def oldest_minor() -> int:
    """Returns N of the oldest Python 3.N that the package supports."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^requires-python = ">=3\.(\d+)"', text, re.MULTILINE)
    if found is None:
        raise ValueError('pyproject.toml: expected requires-python = ">=3.N"')
    return int(found.group(1))


def pyenv_versions() -> list[pathlib.Path]:
    """Returns the interpreters that pyenv has installed."""
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return []
    root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout
    return sorted(pathlib.Path(root.strip(), "versions").glob("3.*/bin/python"))


def runs(path: str, minor: int) -> bool:
    """Returns whether the file runs CPython 3.`minor`; a pyenv shim may lack that version."""
    code = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    command = [path, "-I", "-c", code]
    # Remove variables of an outer environment that would select a different interpreter.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYENV_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
    return done.stdout.split() == ["cpython", "3", str(minor)]


def pythons() -> dict[int, str]:
    """Returns the first working interpreter of each minor version."""
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
