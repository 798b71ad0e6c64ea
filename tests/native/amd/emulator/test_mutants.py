"""Tests that the emulator notices defects; `run.py` tries all of them."""

from __future__ import annotations

import pytest

from . import mutants
from .cases import REUSED, Case

# CI tries these.
QUICK_FAULTS = ("one_word_tested", "partials_not_cleared", "not_canonicalized")
ONE_SHOT = REUSED[0]


@pytest.fixture(scope="module")
def edits() -> dict[str, list[mutants.Edit]]:
    """The edits of the first case, by kind."""
    found: dict[str, list[mutants.Edit]] = {kind: [] for kind in mutants.KINDS}
    for edit in mutants.edits_of_case(ONE_SHOT):
        found[edit.kind].append(edit)
    return found


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", REUSED, ids=lambda case: case.name)
def test_nothing_is_noticed_without_a_defect(case: Case) -> None:
    assert mutants.noticed(case) == ""
    assert mutants.noticed(case, caches_workspaces=True) == ""


@pytest.mark.slow
def test_missing_waits_are_noticed(edits: dict[str, list[mutants.Edit]]) -> None:
    found = [mutants.noticed_edit(ONE_SHOT, edit) for edit in edits["wait"][:5]]
    # Some wait for what an earlier wait has waited for on this path.
    assert found.count("register used before the wait") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["barrier", "scopes of all loads", "scope of a store"])
def test_edits_are_noticed(edits: dict[str, list[mutants.Edit]], kind: str) -> None:
    assert any(mutants.noticed_edit(ONE_SHOT, edit) for edit in edits[kind])


@pytest.mark.slow
def test_missing_scopes_of_loads_are_reported_by_rules(
    edits: dict[str, list[mutants.Edit]],
) -> None:
    found = [mutants.reported_edit(ONE_SHOT, edit) for edit in edits["scope of a load"]]
    # One load reads the failure mark of this GPU's own blocks.
    assert found.count(False) == 1
    assert found.count(True) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_faults_of_the_sources_are_noticed(name: str) -> None:
    (fault,) = (fault for fault in mutants.FAULTS if fault.name == name)
    assert mutants.noticed(fault.case, faults=(name,)) != ""
