"""Runs the snippets of the README and the docs, or checks them without running them.

Fenced blocks, by language:

- python: a whole program (one that creates a process group or has a main part) runs on two CPU
  ranks, and must print the console block after it. A page's other blocks run in order, with the
  names from `setting`. Blocks that need more are counted in `NOT_RUN`, and their names must exist.
- pycon: the value shown must be valid.
- bash, console (commands after "$ "): commands, options, files, targets and extras must exist.
- json, yaml: must parse.  text: not checked.

Commands, files and variables in running text are checked too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.run
import typer.main
import yaml
from limits import HANG_SECONDS
from markdown_it import MarkdownIt
from rank_helpers import comm, on

import allnorm
from allnorm import config
from allnorm.cli import options
from allnorm.cli.app import app
from allnorm.testing import rank_input, shared_input

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = {
    "docs/reference/commands.md",
    *(f"docs/{name}.md" for name in ("changelog", "contributing", "files", "security")),
}
LANGUAGES = {"python", "pycon", "bash", "console", "json", "yaml", "text"}
NOT_RUN = {"docs/trace.md": 1, "docs/transformers.md": 1}
"""Number of blocks per page that need something missing here, such as a model."""
PLACEHOLDERS = {"example.py", "generate.py", "serve.py"}
"""Names of programs that the reader provides."""


class Block(NamedTuple):
    page: str
    line: int  # line of the opening fence
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> dict[str, str]:
    """Returns the text of the pages that users read, keyed by path."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    dated = "docs/engineering-log/"  # dated entries, which were true when written
    return {k: v for k, v in found.items() if k not in GENERATED and not k.startswith(dated)}


def parse(page: str, text: str) -> tuple[list[Block], list[str], list[int]]:
    """Returns the fenced blocks of a page, its inline code, and the lines of indented code."""
    blocks, spans, indented = [], [], []
    for token in MarkdownIt().enable("table").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            blocks.append(Block(page, line, token.info.strip(), token.content))
        elif token.type == "code_block":
            indented.append(line)
        elif token.type == "inline":
            code = [child.content for child in token.children if child.type == "code_inline"]
            spans += [" ".join(text.split()) for text in code]
    return blocks, spans, indented


PAGES = pages()
PARSED = {page: parse(page, text) for page, text in PAGES.items()}
BLOCKS = [block for blocks, *_ in PARSED.values() for block in blocks]


def of(*languages: str) -> Any:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=[block.where for block in found])


# ---- collection ----------------------------------------------------------------------------------


def test_blocks_are_found() -> None:
    assert len(PAGES) >= 20
    assert len(BLOCKS) >= 32
    assert sum(block.language == "python" for block in BLOCKS) >= 9
    assert sum(is_program(block) for block in BLOCKS) >= 4
    assert {block.page for block in BLOCKS} >= {"README.md", "docs/index.md", "docs/usage.md"}


def test_every_block_has_a_language() -> None:
    assert {b.where: b.language for b in BLOCKS if b.language not in LANGUAGES} == {}


def test_code_is_fenced() -> None:
    """Pages must not have indented code blocks, because these tests do not check them."""
    assert {page: lines for page, (_, _, lines) in PARSED.items() if lines} == {}


# ---- Python --------------------------------------------------------------------------------------


def is_program(block: Block) -> bool:
    starts_ranks = "init_process_group" in block.text or "__main__" in block.text
    return block.language == "python" and starts_ranks


def setting() -> dict[str, Any]:
    """Returns the names that blocks can use: a communicator and a call's tensors."""
    communicator = comm()
    make = {"dtype": torch.bfloat16, "device": communicator.device}
    return {
        "torch": torch,
        "allnorm": allnorm,
        "comm": communicator,
        "x": rank_input((4, 4096), rank=communicator.rank, **make),
        "residual": shared_input((4, 4096), name="residual", **make),
        "weight": shared_input((4096,), name="weight", **make),
        "eps": 1e-6,
    }


SETTING = {"torch", "allnorm", "comm", "x", "residual", "weight", "eps"}


def free_names(tree: ast.AST) -> set[str]:
    """Returns the names that are read but never bound, regardless of order."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return read - bound


def bound_names(tree: ast.AST) -> set[str]:
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.alias))
    return {
        n.id if isinstance(n, ast.Name) else (n.asname or n.name).partition(".")[0] for n in stored
    }


def fragments(page: str) -> tuple[list[Block], list[Block]]:
    """Splits a page's Python blocks that are not programs into those that run, and the rest."""
    run, rest, known = [], [], set(SETTING)
    for block in PARSED[page][0]:
        if block.language != "python" or is_program(block):
            continue
        tree = ast.parse(block.text)
        if free_names(tree) <= known:
            run.append(block)
            known |= bound_names(tree)
        else:
            rest.append(block)
    return run, rest


def test_blocks_that_do_not_run_are_listed() -> None:
    found = {page: len(fragments(page)[1]) for page in PAGES}
    assert {page: number for page, number in found.items() if number} == NOT_RUN


@on(cpu=(2,))
@pytest.mark.parametrize("page", [page for page in PAGES if fragments(page)[0]])
def test_blocks_of_a_page_run(rank: int, world_size: int, page: str) -> None:
    names = setting()
    for block in fragments(page)[0]:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)


def programs() -> list[Any]:
    found = []
    for block in filter(is_program, BLOCKS):
        # Inductor calls a C++ compiler, which is slow on a busy machine.
        compiles = "torch.compile" in block.text
        marks = [pytest.mark.slow] if compiles else []
        found.append(pytest.param(block, id=block.where, marks=marks))
    return found


def shown_after(block: Block) -> list[str]:
    """Returns a program's output as shown on its page, in the torchrun block after it."""
    here = PARSED[block.page][0]
    after = here[here.index(block) + 1 :][:1]
    if not after or after[0].language != "console" or "example.py" not in after[0].text:
        return []
    lines = (line.strip() for line in after[0].text.splitlines())
    return [line for line in lines if line and not line.startswith("$ ")]


def test_output_is_compared() -> None:
    assert any(shown_after(block) for block in BLOCKS if is_program(block))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", programs())
def test_programs_run(block: Block, tmp_path: pathlib.Path) -> None:
    (tmp_path / "example.py").write_text(block.text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # One file per rank, because ranks' lines on one terminal could be interleaved.
    torchrun += ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "example.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            # Use the package under test, installed or from the tree, and no GPU.
            "PYTHONPATH": str(pathlib.Path(allnorm.__file__).parent.parent),
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    said = {path: path.read_text() for path in sorted((tmp_path / "logs").rglob("std*.log"))}
    assert result.returncode == 0, (result.stderr, said)
    outputs = [text for path, text in said.items() if path.name == "stdout.log"]
    assert len(outputs) == 2
    shown = shown_after(block)
    for output in outputs:
        printed = [line.strip() for line in output.splitlines()]
        assert [line for line in printed if line in shown] == shown, output


@of("python")
def test_names_exist(block: Block) -> None:
    check_python(block.text)


def check_python(text: str) -> None:
    """Raises if the text is not valid Python or uses a name or parameter that allnorm lacks."""
    tree = ast.parse(text)
    known: dict[str, Any] = {"allnorm": allnorm, "comm": allnorm.Communicator}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "allnorm":
                    module = importlib.import_module(name.name)
                    known[name.asname or "allnorm"] = module if name.asname else allnorm
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("allnorm"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                known[name.asname or name.name] = member(module, name.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value(node, known)
        elif isinstance(node, ast.Call) and (function := value(node.func, known)) is not None:
            parameters = inspect.signature(function).parameters
            for keyword in node.keywords:
                assert keyword.arg in parameters, f"{ast.unparse(node)}: no {keyword.arg}="


def member(module: Any, name: str) -> Any:
    if not hasattr(module, name) and inspect.ismodule(module):
        return importlib.import_module(f"{module.__name__}.{name}")
    if inspect.isclass(module) and re.search(rf"self\.{name}\b", inspect.getsource(module)):
        return None  # of its instances
    return getattr(module, name)


def value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Returns the allnorm object that an expression names, or None if it names none."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = value(node.value, known)
    # The attributes of a value are unknown, unlike those of a module or a class.
    if owner is None or not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return None
    return member(owner, node.attr)


def test_wrong_names_are_found() -> None:
    check_python("import allnorm.compile as c\nc.fuse(graph)\ncomm.plan(4, 8).algorithm")
    for text in (
        "allnorm.Communicater()",
        "comm.al_reduce(x)",
        "allnorm.Communicator(workspace=1)",
        "from allnorm.compile import fuze",
        "from allnorm.integrations import transformers as f\nf.enabled()",
    ):
        with pytest.raises((AttributeError, ImportError, AssertionError)):
            check_python(text)


@of("pycon")
def test_shown_values_are_valid(block: Block) -> None:
    (code, *shown) = block.text.strip().splitlines()
    assert code.startswith(">>> ")
    check_python(code[4:])
    (text,) = shown
    assert repr(eval(text, vars(allnorm).copy())) == text


def test_operators() -> None:
    """The operators' page must list their names, parameters and defaults."""
    (block,) = (b for b in BLOCKS if b.page == "docs/reference/operators.md")
    signature = re.compile(r"^(\w+)\(([^)]*)\)", re.MULTILINE)
    found = signature.findall(block.text)
    shown = {name: [*map(str.strip, args.split(","))] for name, args in found}
    assert len(found) == len(shown) >= 6
    for name, arguments in shown.items():
        schema = getattr(torch.ops.allnorm, name).default._schema
        names = [argument.name for argument in schema.arguments]
        assert [text.partition("=")[0] for text in arguments] == names, name
        for text, argument in zip(arguments, schema.arguments, strict=True):
            assert argument.has_default_value() == ("=" in text), (name, text)


# ---- commands ------------------------------------------------------------------------------------


def commands(block: Block) -> list[str]:
    """Returns a block's command lines, with continuation lines joined."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def check_command(line: str) -> None:
    """Raises if a command does not exist or its arguments are invalid."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        check_variable(words.pop(0).partition("=")[0])
    if words:
        CHECKS[words[0]](words[1:])


def check_variable(name: str) -> None:
    assert not name.startswith("ALLNORM_") or name in config._KNOWN, name


def check_file(name: str) -> None:
    assert name in PLACEHOLDERS or (ROOT / name).is_file(), f"there is no {name}"


def check_allnorm(words: list[str]) -> None:
    if words in ([], ["--help"], ["--version"]):
        return
    command = typer.main.get_command(app).commands[words[0]]
    given = command.make_context(words[0], words[1:]).params
    for name, read in {
        "shapes": options.shapes,
        "tp": lambda text: options.integers(text, "--tp"),
        "tokens": lambda text: options.integers(str(text), "--tokens"),
        "batch": lambda text: options.integers(text, "--batch"),
        "quant": lambda text: options.modes(text),
    }.items():
        if given.get(name) and not str(given[name]).isupper():  # --tp N
            read(given[name])
    if words[0] == "trace":
        check_command(shlex.join(given["command"]))


def check_python_command(words: list[str]) -> None:
    if words[0] != "-m":
        check_script(words)
    elif words[1] == "allnorm":
        check_allnorm(words[2:])
    else:
        assert words[1] in ("sglang.launch_server", "pytest"), words


def check_script(words: list[str]) -> None:
    """Checks that a script is in the tree, and that it or a neighboring module has the options."""
    check_file(words[0])
    if words[0] in PLACEHOLDERS:
        return
    folder = (ROOT / words[0]).parent
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    for word in words[1:]:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in sources, f"{words[0]}: no {option}"


def check_torchrun(words: list[str]) -> None:
    given = torch.distributed.run.get_args_parser().parse_args(words)
    check_file(given.training_script)


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] in ("install", "uninstall", "wheel")
    for word in words[1:]:
        if word.startswith("dist/"):  # a wheel
            continue
        setting = re.fullmatch(r"--config-settings=cmake\.define\.(\w+)=\w+", word)
        if setting:
            assert setting[1] in (ROOT / "CMakeLists.txt").read_text(), word
            continue
        package = re.fullmatch(r"([\w.-]+)(?:\[(.*)\])?", word)
        assert package, word
        if package[2] is not None:
            assert package[1] in ("allnorm", "."), word
            assert set(package[2].split(",")) <= set(extras["optional-dependencies"]), word


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        variable, is_set, _ = word.partition("=")
        known = rf"^{variable} \?=" if is_set else rf"^{word}:"
        assert re.search(known, makefile, re.MULTILINE), word


def check_docker(words: list[str]) -> None:
    """Checks `docker run`: known options, then IMAGE and the command to run in it."""
    image = words.index("IMAGE")
    known = {"--rm", "--gpus", "--ipc", "--pid", "--shm-size", "--network"}
    assert words[0] == "run"
    for word in words[1:image]:
        option = word.partition("=")[0]
        assert option in known or not option.startswith("-"), option
    check_command(shlex.join(words[image + 1 :]))


def check_nothing(words: list[str]) -> None:
    """Accepts a command of other software."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "allnorm": check_allnorm,
    "python": check_python_command,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "make": check_make,
    "docker": check_docker,
    "vllm": check_nothing,
    "df": check_nothing,
}


@of("bash", "console")
def test_commands_exist(
    block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the commands check that files can be written
    found = commands(block)
    assert found, "a block of commands has no commands"
    for line in found:
        check_command(line)


INLINE = re.compile(r"(allnorm [a-z0-9]|python (-m allnorm|\S+\.py)|make [a-z]|pip |torchrun ).*")
SPANS = sorted({(page, text) for page, (_, spans, _) in PARSED.items() for text in spans})
INLINE_COMMANDS = [(page, text) for page, text in SPANS if INLINE.fullmatch(text)]


@pytest.mark.parametrize(
    ("page", "line"), INLINE_COMMANDS, ids=[f"{p}-{t}" for p, t in INLINE_COMMANDS]
)
def test_commands_in_the_text_exist(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check_command(line.replace("-- CMD", "-- torchrun generate.py"))


def test_wrong_commands_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (
        "allnorm bench --shapes 1x4096 --json a.jsonl  # a comment",
        "ALLNORM_DISABLE=1 vllm serve MODEL",
        'pip install "allnorm[cli,plot]"',
        "make install CUDA_ARCHS=90",
        "docker run --ipc=host IMAGE allnorm doctor",
        "torchrun --standalone --nproc-per-node 2 examples/fp8_linear.py",
    ):
        check_command(line)
    for line in (
        "allnorm bench --shape 1x4096",
        "allnorm bench --shapes 4096",
        "allnorm benchmark",
        "allnorm verify --tp two",
        "allnorm trace -- torchrun --nproc 2 nowhere.py",
        "ALLNORM_DISABLED=1 vllm serve MODEL",
        'pip install "allnorm[vllm]"',
        "make everything",
        "make install CUDA_ARCH=90",
        "python benchmarks/nowhere.py",
        "python benchmarks/engines/vllm_latency.py --models DIR",
        "docker run --ipc=host IMAGE allnorm doktor",
        "conda install allnorm",
    ):
        with pytest.raises((Exception, SystemExit)):
            check_command(line)


# ---- the rest ------------------------------------------------------------------------------------


def test_data_can_be_read() -> None:
    for block in BLOCKS:
        if block.language == "yaml":
            assert all(yaml.safe_load_all(block.text)), block.where
        elif block.language == "json":
            rows = block.text.splitlines() if "}\n{" in block.text else [block.text]
            assert all(map(json.loads, rows)), block.where


def test_variables_exist() -> None:
    """Checks that environment and build variables on the pages exist."""
    builds = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").rglob("*"), ROOT / "csrc" / "allnorm.h"]
    built = "".join(path.read_text() for path in builds if path.is_file())
    found = {(p, v) for p, text in PAGES.items() for v in re.findall(r"ALLNORM_[A-Z_]*[A-Z]", text)}
    assert len({variable for _, variable in found}) >= 4
    assert [(p, v) for p, v in found if v not in config._KNOWN and v not in built] == []


def test_named_files_exist() -> None:
    places = r"(?:src|benchmarks|cmake|csrc|docs|examples|tests|tools)/[\w./-]*\w/?"
    named = [(page, text) for page, text in SPANS if re.fullmatch(places, text)]
    assert len(named) >= 20
    assert [(page, text) for page, text in named if not (ROOT / text).exists()] == []
