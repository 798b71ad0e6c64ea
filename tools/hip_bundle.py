"""Joins code objects of AMD GPUs into one bundle, as clang-offload-bundler does.

HIP's runtime finds the code object of a GPU in the bundle of a library by the name of the target.
Not every package of clang has that program. The format: LLVM's page "Clang Offload Bundler".

    python tools/hip_bundle.py BUNDLE gfx942=FILE gfx950=FILE
"""

from __future__ import annotations

import pathlib
import struct
import sys
from collections.abc import Mapping

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_ALIGN_BYTES = 4096  # the runtime maps code objects where they are
_HOST = "host-x86_64-unknown-linux-gnu"


def bundle(objects: Mapping[str, bytes]) -> bytes:
    """Returns a bundle of code objects, which are keyed by target, such as "gfx942"."""
    # The first entry is for the host and empty.
    parts = {_HOST: b""}
    parts |= {f"hipv4-amdgcn-amd-amdhsa--{target}": code for target, code in objects.items()}
    entries = [_MAGIC, struct.pack("<Q", len(parts))]
    body = b""
    begin = _ALIGN_BYTES
    for name, code in parts.items():
        entries.append(struct.pack("<QQQ", begin + len(body), len(code), len(name)))
        entries.append(name.encode())
        body += code + bytes(-len(code) % _ALIGN_BYTES)
    head = b"".join(entries)
    if len(head) > begin:
        raise ValueError(f"{len(parts)} code objects: expected fewer, their names do not fit")
    return head.ljust(begin, b"\0") + body


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    code = {target: pathlib.Path(path).read_bytes() for target, path in given.items()}
    pathlib.Path(sys.argv[1]).write_bytes(bundle(code))
