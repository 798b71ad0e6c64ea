"""A hook of mkdocs that adds pages of the examples, and the selector of versions.

Pages link to the files in `examples/`, as they must to be right in the repository. On the site such
a link leads to the page with the file.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


def on_config(config: Any) -> Any:
    """Adds the selector of versions if mike builds the site; else no file lists them."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike", "default": "latest"}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that have no file in docs/."""
    for name, text in {"tour.md": tour(), "programs.md": programs()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leads links into examples/ to the pages of this hook."""
    markdown = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](programs.md#\1)", markdown)
    return re.sub(r"\]\((?:\.\./)+examples/(\w+)\.ipynb\)", r"](\1.md)", markdown)


def tour() -> str:
    """Returns the notebook in Markdown, with the outputs that it stores."""
    parts = []
    for cell in json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace("](../docs/", "](")
            # The site has a picture per color scheme.
            both = r"\1.svg#only-light)\n\1-dark.svg#only-dark)"
            parts.append(re.sub(r"^(!\[.*\]\(.*)\.svg\)$", both, source, flags=re.MULTILINE))
        else:
            parts.append(fenced("python", source))
            parts += [fenced("text", "".join(output["text"])) for output in cell["outputs"]]
    return "\n\n".join(parts)


def programs() -> str:
    """Returns a page with the source of every program."""
    parts = [
        "# Programs of the examples",
        "The programs in `examples/`, whole. [Examples](examples.md) says what each shows.",
    ]
    for path in sorted(EXAMPLES.glob("*.py")):
        parts.append(f"## examples/{path.name} {{ #{path.stem} }}")
        parts.append(fenced("python", path.read_text()))
    return "\n\n".join(parts)


def fenced(language: str, text: str) -> str:
    """Returns a fenced code block."""
    return f"```{language}\n{text.rstrip()}\n```"
