"""Compares the pages generated from docstrings with the public names of the package."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re

import pytest

from allnorm.core.operators import OPERATORS

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = [
    "allnorm",
    "allnorm.compile",
    "allnorm.errors",
    "allnorm.integrations.transformers",
    "allnorm.reference",
    "allnorm.testing",
    "allnorm.tracing",
]
"""The documented modules."""
ELSEWHERE = {"allnorm.ops": "docs/reference/operators.md", "allnorm.__version__": ""}
"""Names without a generated entry, mapped to their page; "": a name that needs none."""


def directives(text: str) -> list[str]:
    """Returns the objects that a page documents, in the order of the page."""
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def resolve(name: str) -> object:
    """Returns the object of a dotted name, whose modules are imported if needed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(resolve(module), attribute)


PAGES = {
    path.relative_to(ROOT).as_posix(): directives(path.read_text())
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
DOCUMENTED = [name for names in PAGES.values() for name in names]


def public_names(module: str) -> list[str]:
    """Returns `__all__`, or else the classes and functions that the module defines."""
    namespace = importlib.import_module(module)
    defined = [
        name
        for name, value in vars(namespace).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    return list(getattr(namespace, "__all__", defined))


def is_documented(name: str) -> bool:
    """Returns whether a page has this object, under this or another name, or its module."""
    wanted = resolve(name)
    home = getattr(wanted, "__module__", None)
    return any(
        name in (shown, f"{shown}.{name.rpartition('.')[2]}")
        or resolve(shown) is wanted
        or (inspect.ismodule(resolve(shown)) and shown == home)
        for shown in DOCUMENTED
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(module: str) -> None:
    names = [f"{module}.{name}" for name in public_names(module)]
    assert names
    assert [n for n in names if n not in ELSEWHERE and not is_documented(n)] == []


def test_a_missing_entry_is_found() -> None:
    assert is_documented("allnorm.PeerDiedError")  # an entry of its module
    assert not is_documented("allnorm.core.call.Call")


def test_names_without_entries() -> None:
    for name, page in ELSEWHERE.items():
        resolve(name)
        assert not page or name in (ROOT / page).read_text()


def test_entries_are_public_documented_and_not_repeated() -> None:
    """A generated entry without a docstring would be an empty heading."""
    assert len(DOCUMENTED) > 60
    assert sorted(set(DOCUMENTED)) == sorted(DOCUMENTED)
    for name in DOCUMENTED:
        value = resolve(name)
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("name", OPERATORS)
def test_signatures_of_operators(name: str) -> None:
    """The page of operators has the parameters and defaults of every schema."""
    text = (ROOT / ELSEWHERE["allnorm.ops"]).read_text()
    found = re.search(rf"^{name}\(([^)]*)\)", text, re.MULTILINE)
    assert found is not None
    expected = [
        str(parameter).removeprefix(f"{parameter.type} ")
        for parameter in OPERATORS[name].parameters
    ]
    assert [part.strip() for part in found[1].split(",")] == expected
