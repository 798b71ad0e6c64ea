"""Compiles the emulator, and runs LLVM tools."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator

from native.amd.compiler import BUILD, tool

HERE = pathlib.Path(__file__).resolve().parent
CSRC = HERE.parents[3] / "csrc"
SOURCES = ("accesses", "c_api", "floats", "machine", "memory", "scalar", "vector")
FLAGS = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra"]


def run_tool(name: str, *arguments: str | pathlib.Path, stdin: str = "") -> str:
    """Runs an LLVM tool and returns what it printed.

    Raises:
        RuntimeError: The tool failed; the message is what it printed.
        ToolMissingError: LLVM 22 is not installed.
    """
    command = [tool(name), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Lets one process at a time make a file, so that parallel tests do not compile it twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def key_of(files: Iterable[pathlib.Path], *rest: object) -> str:
    """Returns a name for what is compiled from files, which changes with their contents."""
    key = hashlib.sha256(repr(rest).encode())
    for path in sorted(files):
        key.update(path.read_bytes())
    return key.hexdigest()[:16]


def compile_library(
    name: str, sources: list[pathlib.Path], headers: Iterable[pathlib.Path], flags: list[str]
) -> pathlib.Path:
    """Compiles C++ sources to a shared library, two at a time, and returns its path.

    Args:
        name: The first part of the library's name.
        sources: What is compiled.
        headers: All files that the sources may include.
        flags: Options of the compiler.

    Raises:
        RuntimeError: A source does not compile.
        ToolMissingError: clang++-22 is not installed.
    """
    key = key_of({*sources, *headers}, flags)
    library = BUILD / f"{name}-{key}.so"
    with locked(library), tempfile.TemporaryDirectory() as scratch:
        if library.exists():
            return library

        def compile_one(source: pathlib.Path) -> pathlib.Path:
            compiled = pathlib.Path(scratch) / f"{source.stem}.o"
            run_tool("clang++", *flags, "-c", source, "-o", compiled)
            return compiled

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            compiled = list(pool.map(compile_one, sources))
        finished = pathlib.Path(scratch) / library.name
        run_tool("clang++", "-shared", *compiled, "-o", finished)
        publish(finished, library)
    return library


def publish(finished: pathlib.Path, path: pathlib.Path) -> None:
    """Moves a finished file to a path that other processes may look for."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as copy:
        shutil.copyfile(finished, copy.name)
    os.replace(copy.name, path)


@functools.cache
def emulator_library() -> pathlib.Path:
    """Compiles the emulator."""
    sources = [HERE / f"{name}.cpp" for name in SOURCES]
    return compile_library("emulator", sources, HERE.glob("*.h"), FLAGS)
