"""Creates the virtual environment for `make`, and installs groups of packages into it.

    python3 tools/setup_venv.py VENV GROUP...

Groups: build, run, test, lint, docs, release, as in pyproject.toml. Running it again is cheap.

If the interpreter already has a suitable torch, the environment shares the interpreter's packages
and installs only missing ones. This supports machines with their own torch build or without a
network. Otherwise versions come from constraints.txt.
"""

import pathlib
import re
import subprocess
import sys

if sys.version_info < (3, 11):
    sys.exit(
        "allnorm needs Python 3.11 or newer, and {} is {}.{}. "
        "Choose a newer one: make PYTHON=python3.12".format(sys.executable, *sys.version_info[:2])
    )

import importlib.metadata
import sysconfig
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOST_PACKAGES = "host-packages.pth"


def groups() -> dict[str, list[str]]:
    """Returns the requirements of every group."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    return {
        "build": pyproject["build-system"]["requires"],
        "run": [*pyproject["project"]["dependencies"], *extras["cli"]],
        "test": extras["test"],
        "lint": extras["lint"],
        "docs": extras["docs"],
        "release": extras["release"],
    }


def host_has_torch(torch_requirement: str) -> bool:
    """Returns whether this interpreter has a torch version that the package supports."""
    try:
        have = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False

    def numbers(version: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", version)[:2]]

    return numbers(have) >= numbers(torch_requirement)


def pip(venv: pathlib.Path, *arguments: str) -> None:
    """Runs the pip of `venv`."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--quiet", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")


def create(venv: pathlib.Path, share_host_packages: bool) -> None:
    """Creates `venv`, which optionally shares the interpreter's packages."""
    print(f"creating {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    if share_host_packages:
        # Not --system-site-packages: if the interpreter belongs to a virtual environment, that
        # would share the packages of its base Python instead.
        # Uninstall setuptools, which venv adds up to Python 3.11, to use the interpreter's.
        pip(venv, "uninstall", "--yes", "setuptools")
        here = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        paths = sysconfig.get_paths(vars={"base": str(venv), "platbase": str(venv)})
        pathlib.Path(paths["purelib"], HOST_PACKAGES).write_text("\n".join(here) + "\n")


def install(venv: pathlib.Path, requirements: list[str]) -> None:
    """Installs missing requirements."""
    shares = any(venv.glob(f"lib/python*/site-packages/{HOST_PACKAGES}"))
    constraints = [] if shares else ["--constraint", str(ROOT / "constraints.txt")]
    pip(venv, "install", *constraints, *requirements)


def main() -> None:
    """Runs the command line."""
    venv, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    known = groups()
    torch_requirement = next(r for r in known["run"] if r.startswith("torch"))
    if not (venv / "bin" / "python").exists():
        create(venv, host_has_torch(torch_requirement))
    install(venv, [requirement for name in names for requirement in known[name]])


if __name__ == "__main__":
    main()
