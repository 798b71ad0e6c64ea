"""Tests that the PTX model reproduces the known outcomes of litmus tests.

Sources: the PTX ISA (8.10, its litmus tests), Lustig et al., "A Formal Analysis of the NVIDIA PTX
Memory Consistency Model" (ASPLOS 2019), and the PTX suite of the verifier Dat3M. The outcomes
follow from these texts, not from this model.
"""

from __future__ import annotations

import pytest

from .notation import parse

pytest.importorskip("z3")

from .ptx import Executions

# Each test: its name, whether the outcome is allowed, the values that are read, and the threads.
LITMUS = """
MP: allowed f=1 d=0
  A: st.weak x 1; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; ld.weak d x

MP, release and acquire: forbidden f=1 d=0
  A: st.weak x 1; st.release.sys y 1
  B: ld.acquire.sys f y; ld.weak d x

MP, fences: forbidden f=1 d=0
  A: st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x

MP, no acquire: allowed f=1 d=0
  A: st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; ld.relaxed.sys d x

MP, no release: allowed f=1 d=0
  A: st.relaxed.sys x 1; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.relaxed.sys d x

MP, a weak flag between fences: allowed f=1 d=0
  A: st.weak x 1; fence.acq_rel.sys; st.weak y 1
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x

MP, one fence of GPU scope: allowed f=1 d=0
  A: st.weak x 1; fence.acq_rel.gpu; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x

MP, GPU scope within a GPU: forbidden f=1 d=0
  A: st.weak x 1; st.release.gpu y 1
  N: ld.acquire.gpu f y; ld.weak d x

MP, block scope between blocks: allowed f=1 d=0
  A: st.weak x 1; st.release.cta y 1
  N: ld.acquire.cta f y; ld.weak d x

MP, the release followed by a relaxed store: forbidden f=1 d=0
  A: st.weak x 1; st.release.sys y 7; st.relaxed.sys y 1
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x

MP, a fence after the flag: allowed f=1 d=0
  A: st.weak x 1; st.relaxed.sys y 1; fence.acq_rel.sys
  B: ld.relaxed.sys f y; fence.acq_rel.sys; ld.weak d x

MP, bar.sync: forbidden d=0
  A: st.weak x 1; bar.sync
  A: ld.weak f x; bar.sync; ld.weak d x

MP through other threads of both blocks: forbidden f=1 d=0
  A: st.weak x 1; bar.sync
  A: st.weak z 9; bar.sync; st.release.sys y 1
  B: ld.acquire.sys f y; bar.sync
  B: st.weak z 8; bar.sync; ld.weak d x

MP through other threads, no barrier at the end: allowed f=1 d=0
  A: st.weak x 1; bar.sync
  A: st.weak z 9; bar.sync; st.release.sys y 1
  B: ld.acquire.sys f y
  B: ld.weak d x

SB: allowed a=0 b=0
  A: st.relaxed.sys x 1; ld.relaxed.sys a y
  B: st.relaxed.sys y 1; ld.relaxed.sys b x

SB, acq_rel: allowed a=0 b=0
  A: st.relaxed.sys x 1; fence.acq_rel.sys; ld.relaxed.sys a y
  B: st.relaxed.sys y 1; fence.acq_rel.sys; ld.relaxed.sys b x

SB, sc: forbidden a=0 b=0
  A: st.relaxed.sys x 1; fence.sc.sys; ld.relaxed.sys a y
  B: st.relaxed.sys y 1; fence.sc.sys; ld.relaxed.sys b x

SB, sc, weak accesses: forbidden a=0 b=0
  A: st.weak x 1; fence.sc.sys; ld.weak a y
  B: st.weak y 1; fence.sc.sys; ld.weak b x

SB, sc of block scope: allowed a=0 b=0
  A: st.weak x 1; fence.sc.cta; ld.weak a y
  N: st.weak y 1; fence.sc.cta; ld.weak b x

CoRR: forbidden a=1 b=0
  A: st.relaxed.sys x 1
  B: ld.relaxed.sys a x; ld.relaxed.sys b x

CoRR, weak: allowed a=1 b=0
  A: st.release.gpu x 1
  B: ld.weak a x; ld.weak b x

CoWW: forbidden a=1
  A: st.weak x 1; st.weak x 2; ld.acquire.sys a x

CoWR: forbidden a=2 b=1
  A: st.relaxed.sys x 1; ld.relaxed.sys a x
  B: st.relaxed.sys x 2; ld.relaxed.sys b x

a weak write after a read of a strong one: forbidden a=1 b=1
  A: st.relaxed.sys x 1
  B: ld.relaxed.sys a x; st.weak x 2; ld.relaxed.sys b x

LB: allowed a=1 b=1
  A: ld.relaxed.sys a x; st.relaxed.sys y 1
  B: ld.relaxed.sys b y; st.relaxed.sys x 1

LB, acquire and release: forbidden a=1 b=1
  A: ld.acquire.sys a x; st.release.sys y 1
  B: ld.acquire.sys b y; st.release.sys x 1

WRC: allowed a=1 b=1 c=0
  A: st.weak x 1
  B: ld.relaxed.sys a x; st.release.sys y 1
  C: ld.acquire.sys b y; ld.weak c x

WRC, strong: forbidden a=1 b=1 c=0
  A: st.relaxed.sys x 1
  B: ld.relaxed.sys a x; st.release.sys y 1
  C: ld.acquire.sys b y; ld.relaxed.sys c x

WRC, no release: allowed a=1 b=1 c=0
  A: st.relaxed.sys x 1
  B: ld.relaxed.sys a x; st.relaxed.sys y 1
  C: ld.acquire.sys b y; ld.relaxed.sys c x

ISA2 across scopes: forbidden a=1 b=1 c=0
  A: st.weak x 1; st.release.cta y 1
  A: ld.acquire.cta a y; st.release.sys z 1
  B: ld.acquire.sys b z; ld.weak c x

IRIW: allowed a=1 b=0 c=1 d=0
  A: st.relaxed.sys x 1
  B: st.relaxed.sys y 1
  C: ld.acquire.sys a x; ld.acquire.sys b y
  D: ld.acquire.sys c y; ld.acquire.sys d x

IRIW, sc: forbidden a=1 b=0 c=1 d=0
  A: st.relaxed.sys x 1
  B: st.relaxed.sys y 1
  C: ld.relaxed.sys a x; fence.sc.sys; ld.relaxed.sys b y
  D: ld.relaxed.sys c y; fence.sc.sys; ld.relaxed.sys d x

LB, dependences: forbidden a=1 b=1
  A: ld.relaxed.sys a x; st.relaxed.sys y 1
  B: ld.relaxed.sys b y; st.relaxed.sys x 1
"""
TESTS = {test.partition(":")[0]: test for test in LITMUS.strip().split("\n\n")}


@pytest.mark.parametrize("name", TESTS)
def test_ptx(name: str) -> None:
    head, *columns = TESTS[name].splitlines()
    verdict, *outcome = head.partition(": ")[2].split()
    program, reads = parse(*columns, data_dependent="dependences" in name)
    executions = Executions(program)
    results = (result.split("=") for result in outcome)
    found = executions.find(*(executions.reads(reads[r], int(value)) for r, value in results))
    assert (found is not None) == (verdict == "allowed"), found
