"""The defects that are put into the CUDA kernels fit the kernels; `make mutants` tries them."""

from __future__ import annotations

import pytest
from script_helpers import ROOT

from .kernel_mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_of_these_sources(mutant: Mutant) -> None:
    edited = mutant.edited(ROOT / "csrc")
    assert edited
    for name, text in edited.items():
        assert text != (ROOT / "csrc" / name).read_text()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
