"""The model of PTX against outcomes that are known of it.

Sources: the PTX ISA (8.10, its litmus tests), Lustig et al., "A Formal Analysis of the NVIDIA PTX
Memory Consistency Model" (ASPLOS 2019), and the PTX suite of the verifier Dat3M. What is `allowed`
follows from these texts; none was taken from what this model says.
"""

from __future__ import annotations

import pytest

from .notation import parse

pytest.importorskip("z3")

from .ptx import Executions

A, B, C, D = "gpu0 cta0: ", "gpu1 cta1: ", "gpu2 cta2: ", "gpu3 cta3: "
NEAR, BESIDE = "gpu0 cta1: ", "gpu0 cta0: "  # another block of A's GPU; a thread of A's block

MP = {"f": 1, "d": 0}
SB = {"a": 0, "b": 0}

# name: (columns, what the reads return, allowed)
TESTS = {
    # message passing
    "MP": (
        (A + "st.weak x 1; st.relaxed.sys y 1", B + "ld.relaxed.sys f y; ld.weak d x"),
        *(MP, True),
    ),
    "MP, release and acquire": (
        (A + "st.weak x 1; st.release.sys y 1", B + "ld.acquire.sys f y; ld.weak d x"),
        *(MP, False),
    ),
    "MP, fences": (
        (
            A + "st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x",
        ),
        *(MP, False),
    ),
    "MP, no acquire": (
        (
            A + "st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1",
            B + "ld.relaxed.sys f y; ld.relaxed.sys d x",
        ),
        *(MP, True),
    ),
    "MP, no release": (
        (
            A + "st.relaxed.sys x 1; st.relaxed.sys y 1",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.relaxed.sys d x",
        ),
        *(MP, True),
    ),
    "MP, a weak flag between fences": (
        (
            A + "st.weak x 1; fence.acq_rel.sys; st.weak y 1",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x",
        ),
        *(MP, True),
    ),
    "MP, one fence of the GPU only": (
        (
            A + "st.weak x 1; fence.acq_rel.gpu; st.relaxed.sys y 1",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x",
        ),
        *(MP, True),
    ),
    "MP, scope of the GPU within one": (
        (A + "st.weak x 1; st.release.gpu y 1", NEAR + "ld.acquire.gpu f y; ld.weak d x"),
        *(MP, False),
    ),
    "MP, scope of a block between blocks": (
        (A + "st.weak x 1; st.release.cta y 1", NEAR + "ld.acquire.cta f y; ld.weak d x"),
        *(MP, True),
    ),
    "MP, the release followed by a relaxed store": (
        (
            A + "st.weak x 1; st.release.sys y 7; st.relaxed.sys y 1",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x",
        ),
        *(MP, False),
    ),
    "MP, a fence after the flag": (
        (
            A + "st.weak x 1; st.relaxed.sys y 1; fence.acq_rel.sys",
            B + "ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x",
        ),
        *(MP, True),
    ),
    # barriers
    "MP, bar.sync": (
        (A + "st.weak x 1; bar.sync", BESIDE + "ld.weak f x; bar.sync; ld.weak d x"),
        *({"d": 0}, False),
    ),
    "MP through other threads of both blocks": (
        (
            A + "st.weak x 1; bar.sync",
            BESIDE + "st.weak z 9; bar.sync; st.release.sys y 1",
            B + "ld.acquire.sys f y; bar.sync",
            B + "st.weak z 8; bar.sync; ld.weak d x",
        ),
        *(MP, False),
    ),
    "MP through other threads, no barrier at the end": (
        (
            A + "st.weak x 1; bar.sync",
            BESIDE + "st.weak z 9; bar.sync; st.release.sys y 1",
            B + "ld.acquire.sys f y",
            B + "ld.weak d x",
        ),
        *(MP, True),
    ),
    # store buffering
    "SB": (
        (
            A + "st.relaxed.sys x 1; ld.relaxed.sys a y",
            B + "st.relaxed.sys y 1; ld.relaxed.sys b x",
        ),
        *(SB, True),
    ),
    "SB, acq_rel": (
        (
            A + "st.relaxed.sys x 1; fence.acq_rel.sys; ld.relaxed.sys a y",
            B + "st.relaxed.sys y 1; fence.acq_rel.sys; ld.relaxed.sys b x",
        ),
        *(SB, True),
    ),
    "SB, sc": (
        (
            A + "st.relaxed.sys x 1; fence.sc.sys; ld.relaxed.sys a y",
            B + "st.relaxed.sys y 1; fence.sc.sys; ld.relaxed.sys b x",
        ),
        *(SB, False),
    ),
    "SB, sc, weak accesses": (
        (
            A + "st.weak x 1; fence.sc.sys; ld.weak a y",
            B + "st.weak y 1; fence.sc.sys; ld.weak b x",
        ),
        *(SB, False),
    ),
    "SB, sc of each block": (
        (
            A + "st.weak x 1; fence.sc.cta; ld.weak a y",
            NEAR + "st.weak y 1; fence.sc.cta; ld.weak b x",
        ),
        *(SB, True),
    ),
    # coherence
    "CoRR": (
        (A + "st.relaxed.sys x 1", B + "ld.relaxed.sys a x; ld.relaxed.sys b x"),
        *({"a": 1, "b": 0}, False),
    ),
    "CoRR, weak": (
        (A + "st.release.gpu x 1", B + "ld.weak a x; ld.weak b x"),
        *({"a": 1, "b": 0}, True),
    ),
    "CoWW": (
        (A + "st.weak x 1; st.weak x 2; ld.acquire.sys a x",),
        *({"a": 1}, False),
    ),
    "CoWR": (
        (
            A + "st.relaxed.sys x 1; ld.relaxed.sys a x",
            B + "st.relaxed.sys x 2; ld.relaxed.sys b x",
        ),
        *({"a": 2, "b": 1}, False),
    ),
    "a weak write after a read of a strong one": (
        (A + "st.relaxed.sys x 1", B + "ld.relaxed.sys a x; st.weak x 2; ld.relaxed.sys b x"),
        *({"a": 1, "b": 1}, False),
    ),
    # load buffering, thin air
    "LB": (
        (
            A + "ld.relaxed.sys a x; st.relaxed.sys y 1",
            B + "ld.relaxed.sys b y; st.relaxed.sys x 1",
        ),
        *({"a": 1, "b": 1}, True),
    ),
    "LB, acquire and release": (
        (
            A + "ld.acquire.sys a x; st.release.sys y 1",
            B + "ld.acquire.sys b y; st.release.sys x 1",
        ),
        *({"a": 1, "b": 1}, False),
    ),
    # more than two threads
    "WRC": (
        (
            A + "st.weak x 1",
            B + "ld.relaxed.sys a x; st.release.sys y 1",
            C + "ld.acquire.sys b y; ld.weak c x",
        ),
        *({"a": 1, "b": 1, "c": 0}, True),  # the first thread's store is weak
    ),
    "WRC, strong": (
        (
            A + "st.relaxed.sys x 1",
            B + "ld.relaxed.sys a x; st.release.sys y 1",
            C + "ld.acquire.sys b y; ld.relaxed.sys c x",
        ),
        *({"a": 1, "b": 1, "c": 0}, False),
    ),
    "WRC, no release": (
        (
            A + "st.relaxed.sys x 1",
            B + "ld.relaxed.sys a x; st.relaxed.sys y 1",
            C + "ld.acquire.sys b y; ld.relaxed.sys c x",
        ),
        *({"a": 1, "b": 1, "c": 0}, True),
    ),
    "ISA2 across scopes": (
        (
            A + "st.weak x 1; st.release.cta y 1",
            BESIDE + "ld.acquire.cta a y; st.release.sys z 1",
            B + "ld.acquire.sys b z; ld.weak c x",
        ),
        *({"a": 1, "b": 1, "c": 0}, False),
    ),
    "IRIW": (
        (
            *(A + "st.relaxed.sys x 1", B + "st.relaxed.sys y 1"),
            C + "ld.acquire.sys a x; ld.acquire.sys b y",
            D + "ld.acquire.sys c y; ld.acquire.sys d x",
        ),
        *({"a": 1, "b": 0, "c": 1, "d": 0}, True),
    ),
    "IRIW, sc": (
        (
            *(A + "st.relaxed.sys x 1", B + "st.relaxed.sys y 1"),
            C + "ld.relaxed.sys a x; fence.sc.sys; ld.relaxed.sys b y",
            D + "ld.relaxed.sys c y; fence.sc.sys; ld.relaxed.sys d x",
        ),
        *({"a": 1, "b": 0, "c": 1, "d": 0}, False),
    ),
}


@pytest.mark.parametrize("name", TESTS)
def test_ptx(name: str) -> None:
    columns, outcome, allowed = TESTS[name]
    program, reads = parse(*columns)
    executions = Executions(program)
    found = executions.find(*(executions.reads(reads[r], value) for r, value in outcome.items()))
    assert (found is not None) == allowed, found


def test_load_buffering_with_dependences_is_thin_air() -> None:
    columns = (
        A + "ld.relaxed.sys a x; st.relaxed.sys y 1",
        B + "ld.relaxed.sys b y; st.relaxed.sys x 1",
    )
    program, reads = parse(*columns, data_dependent=True)
    executions = Executions(program)
    assert executions.find(executions.reads(reads["a"], 1), executions.reads(reads["b"], 1)) is None
