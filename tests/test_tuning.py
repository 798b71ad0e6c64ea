"""Tests tuning tables: valid contents, which table is used, results that do not depend on it."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_helpers import Case, device, on, same_on_every_rank

import allnorm
from allnorm import config, names, policy, tuning
from allnorm.policy import Curve, Step, Table
from allnorm.tuning import Measured

NAME = "NVIDIA H200"
SHIPPED = sorted((pathlib.Path(tuning.__file__).parent / "seeds").glob("*.json"))


def entry(*steps: tuple[int | None, str], hidden_size: int = 4096, **more: Any) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "epilogue": "norm",
        "hidden_size": hidden_size,
        "steps": [
            {"max_tokens": tokens, "algorithm": name, "num_blocks": 0} for tokens, name in steps
        ],
        **more,
    }


def document(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "format": tuning.FORMAT,
        "allnorm": allnorm.__version__,
        "device": NAME,
        "world_size": 4,
        "date": "2026-11-21T12:00:00+00:00",
        "entries": list(entries) or [entry((16, "one_shot"), (None, "two_shot"))],
        **more,
    }


# ---- files ---------------------------------------------------------------------------------------


def test_a_stored_table_can_be_read(tmp_path: pathlib.Path) -> None:
    curves = {
        ("bfloat16", "norm"): [
            Curve(2880, (Step(7, "one_shot"), Step(900, "two_shot"), Step(None, "two_shot", 132))),
            Curve(4096, (Step(None, "unfused"),)),
            Curve(5120, (Step(9, "one_shot", 0, 2), Step(None, "two_shot")), 7168, 1024),
        ],
        ("float16", "per_group"): [Curve(4096, (Step(None, "one_shot"),))],
    }
    provenance = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc"}
    path = tmp_path / "new" / tuning.file_name(NAME, 4)
    for ahead in (None, 0, 64):  # rows of calls that prefetch; None: not measured, not stored
        measured = Measured(curves, 369.5, ahead)
        tuning.save(path, tuning.document(measured, NAME, 4, provenance))
        own = tuning.read(path, NAME, 4)
        assert own.tuned == measured
    assert (own.found.problem, own.found.date) == ("", "2026-11-21")
    assert own.found.digest
    assert [p.name for p in path.parent.iterdir()] == ["nvidia-h200-4.json"]


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        *folders, last = path.split(".")
        inner: Any = table
        for folder in folders:
            inner = inner[int(folder) if folder.isdecimal() else folder]
        if value is KeyError:
            del inner[last]
        else:
            inner[int(last) if last.isdecimal() else last] = value

    return change


WRONG = {
    "a different format": changed("format", 1),
    "no format": changed("format", KeyError),
    "a different release": changed("allnorm", "0.0.1"),
    "a different device": changed("device", "NVIDIA B200"),
    "more ranks": changed("world_size", 8),
    "ranks as text": changed("world_size", "4"),
    "no entries": changed("entries", KeyError),
    "entries are no list": changed("entries", {}),
    "an entry is a number": changed("entries.0", 3),
    "unknown dtype": changed("entries.0.dtype", "float8"),
    "no dtype": changed("entries.0.dtype", KeyError),
    "unknown epilogue": changed("entries.0.epilogue", ["norm"]),
    "no columns": changed("entries.0.hidden_size", 0),
    "columns as text": changed("entries.0.hidden_size", "4096"),
    "columns are true": changed("entries.0.hidden_size", True),
    "steps are no list": changed("entries.0.steps", "one_shot"),
    "no steps": changed("entries.0.steps", []),
    "a step is null": changed("entries.0.steps.0", None),
    "unknown algorithm": changed("entries.0.steps.0.algorithm", "ring"),
    "negative tokens": changed("entries.0.steps.0.max_tokens", -1),
    "zero tokens": changed("entries.0.steps.0.max_tokens", 0),
    "fractional tokens": changed("entries.0.steps.0.max_tokens", 1.5),
    "an early end": changed("entries.0.steps.0.max_tokens", None),
    "no end": changed("entries.0.steps.1.max_tokens", 99),
    "negative blocks": changed("entries.0.steps.1.num_blocks", -1),
    "very many blocks": changed("entries.0.steps.1.num_blocks", 1 << 20),
    "three blocks per row": changed("entries.0.steps.0.cluster_size", 3),
    "blocks per row as text": changed("entries.0.steps.0.cluster_size", "two"),
    "a product without its tokens": changed("entries.0.product", 7168),
    "a negative product": changed("entries.0.product", -1),
    "a rate as text": changed("link_gbps", "362"),
    "a rate is true": changed("link_gbps", True),
    "a rate is null": changed("link_gbps", None),
    "a negative rate": changed("link_gbps", -362),
    "a rate of bytes": changed("link_gbps", 0.5),
    "an infinite rate": changed("link_gbps", math.inf),
    "a rate that is NaN": changed("link_gbps", math.nan),
    "prefetch as text": changed("prefetch_tokens", "off"),
    "negative rows that prefetch": changed("prefetch_tokens", -1),
    "the same columns twice": lambda t: t["entries"].append(t["entries"][0]),
    "steps that do not rise": lambda t: t["entries"][0]["steps"].insert(
        0, {"max_tokens": 16, "algorithm": "two_shot", "num_blocks": 0}
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    table = copy.deepcopy(document())
    tuning.check(table, NAME, 4)
    WRONG[name](table)
    with pytest.raises(tuning.TableError):
        tuning.check(table, NAME, 4)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table))
    own = tuning.read(path, NAME, 4)
    assert (own.tuned, own.found.digest) == (Measured(), "")
    assert own.found.problem


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b'"' + b" " * (5 << 20) + b'"'],
    ids=["empty", "half", "null", "list", "no text", "deep", "huge"],
)
def test_a_file_without_a_table_is_a_problem_but_no_error(
    content: bytes, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    own = tuning.read(path, NAME, 4)
    assert own.tuned == Measured()
    assert own.found.problem


def test_only_unreadable_files_are_a_problem(tmp_path: pathlib.Path) -> None:
    assert not tuning.read(tmp_path / "absent" / "t.json", NAME, 4).found.problem
    assert "cannot be read" in tuning.read(tmp_path, NAME, 4).found.problem  # a folder


def test_a_failed_save_leaves_the_old_table(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        tuning.save(path, {"not JSON": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("path", SHIPPED, ids=[path.name for path in SHIPPED])
def test_shipped_tables(path: pathlib.Path) -> None:
    table = json.loads(path.read_text())
    measured = tuning.check(table, table["device"], table["world_size"], release="")
    assert path.name == tuning.file_name(table["device"], table["world_size"])
    assert ("bfloat16", "norm") in measured.curves
    assert {"source", "command", "date", "commit"} <= table.keys(), "where the numbers come from"
    own = tuning.read(path.parent / "absent.json", table["device"], table["world_size"])
    tables, warning = tuning.tables(own, [own.found] * table["world_size"])
    assert [t.source for t in tables] == ["seed " + table["device"].lower()[7:]]
    assert warning == ""


def test_tables_are_shipped_for_h200() -> None:
    assert {path.name for path in SHIPPED} >= {"nvidia-h200-2.json", "nvidia-h200-4.json"}


def test_where_tables_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("ALLNORM_TUNING_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.path_of(None, NAME, 8) == tmp_path / "allnorm" / "tuning" / "nvidia-h200-8.json"
    monkeypatch.setenv("ALLNORM_TUNING_DIR", str(tmp_path / "mine"))
    assert tuning.path_of(None, NAME, 8) == tmp_path / "mine" / "nvidia-h200-8.json"
    assert tuning.path_of(tmp_path, "?", 2) == tmp_path / "unknown-2.json"
    home = config.cache_dir({"XDG_CACHE_HOME": "relative"})
    assert home == pathlib.Path("~/.cache/allnorm").expanduser()


# ---- whose table ---------------------------------------------------------------------------------


def found(**changes: str) -> tuning.TableSummary:
    return tuning.TableSummary(**{"device": NAME, "seed": "s", "path": "/t.json", **changes})


def test_ranks_agree_on_a_table() -> None:
    same, none = found(digest="a", date="2026-11-21"), found()
    assert tuning.agree([same, same]) == (True, "")
    assert tuning.agree([none, none]) == (False, "")
    for founds in ([same, none], [none, same], [same, found(digest="b")]):
        used, warning = tuning.agree(founds)
        assert not used
        assert "different tuning tables" in warning
        assert "rank 1: /t.json" in warning
        assert "allnorm tune" in warning
    used, warning = tuning.agree([same, found(problem="it is not valid JSON")])
    assert not used
    assert "rank 1 is ignored: it is not valid JSON. Run `allnorm tune`" in warning


def test_different_devices_have_no_table_in_common() -> None:
    curves = {("bfloat16", "norm"): [Curve(64, (Step(None, "two_shot"),))]}
    own = tuning.RankTables(found(), Measured(), Measured(curves, 9.0))
    assert len(tuning.tables(own, [own.found, own.found])[0]) == 1
    for other in (found(device="NVIDIA H100"), found(seed="another")):
        assert tuning.tables(own, [own.found, other]) == ((), "")


def test_the_rate_of_the_link_is_that_of_the_first_table() -> None:
    """The user's rate is used even if it is 0, because its curves were measured with it."""
    curves = {("bfloat16", "norm"): [Curve(64, (Step(None, "two_shot"),))]}
    for tuned, expected in ((0.0, 0.0), (300.0, 300.0)):
        own = tuning.RankTables(found(digest="a"), Measured(curves, tuned), Measured(curves, 369.0))
        tables, _ = tuning.tables(own, [own.found, own.found])
        assert [table.link_gbps for table in tables] == [tuned, 369.0]
        for algorithm in ("auto", "one_shot", "two_shot"):
            assert rate(tables, algorithm) == expected
            assert rate(tables[1:], algorithm) == 369.0
            assert rate((), algorithm) == 0.0
        assert rate(tables, "unfused") == 0.0, "an unfused call sends nothing itself"


def rate(tables: tuple[Table, ...], algorithm: str) -> float:
    traits = policy.Traits("cuda", 4, tables=tables)
    plenty = {"one_shot": 10**6, "two_shot": 10**6}
    return policy.choose(traits, 8, 64, 2, plenty, algorithm).link_gbps


def test_the_first_table_that_measured_prefetch_decides() -> None:
    """Without a measurement, no call prefetches."""

    def prefetches(*measured: int | None) -> list[int]:
        tables = tuple(Table("a table", {}, 0.0, tokens) for tokens in measured)
        traits, plenty = policy.Traits("cuda", 2, tables=tables), {"one_shot": 99, "two_shot": 99}
        rows = (1, 8, 32, 33, 64)
        return [n for n in rows if policy.choose(traits, n, 4096, 2, plenty).prefetch_bytes]

    assert prefetches() == prefetches(None) == prefetches(None, None) == []
    assert prefetches(32) == prefetches(None, 32, 64) == [1, 8, 32]
    assert prefetches(0) == prefetches(None, 0, 64) == []
    assert prefetches(8, 64) == [1, 8]
    assert prefetches(64) == [1, 8, 32, 33, 64]
    own = tuning.RankTables(found(digest="a"), Measured({}, 0.0, 7), Measured(SEEDED, 0.0, 5))
    assert [t.prefetch_tokens for t in tuning.tables(own, [own.found] * 2)[0]] == [7, 5]


SEEDED = {("bfloat16", "norm"): [Curve(64, (Step(None, "two_shot"),))]}

# ---- choosing ------------------------------------------------------------------------------------

TABLE = Table(
    "tuned somewhere",
    {
        ("bfloat16", "norm"): (
            Curve(2048, (Step(10, "one_shot"), Step(None, "two_shot"))),
            Curve(8192, (Step(3, "one_shot"), Step(99, "two_shot"), Step(None, "two_shot", 64))),
        ),
        ("bfloat16", "per_group"): (Curve(2048, (Step(None, "two_shot"),)),),
    },
)


def choose(tokens: int, hidden_size: int, *kind: str, tables: Any = (TABLE,)) -> policy.Plan:
    traits = policy.Traits("cuda", 4, tables=tables)
    plenty = {"one_shot": 10**6, "two_shot": 10**6}
    return policy.choose(traits, tokens, hidden_size, 2, plenty, kind=kind or ("bfloat16", "norm"))


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "algorithm", "num_blocks"),
    [
        (0, 2048, "one_shot", 0),
        (10, 2048, "one_shot", 0),
        (11, 2048, "two_shot", 0),
        (3, 8192, "one_shot", 0),
        (4, 8192, "two_shot", 0),
        (99, 8192, "two_shot", 0),
        (100, 8192, "two_shot", 64),
        # The nearest hidden size, at the same number of bytes.
        (20, 1024, "one_shot", 0),
        (21, 1024, "two_shot", 0),
        (1, 16384, "one_shot", 0),
        (2, 16384, "two_shot", 0),
        (50, 16384, "two_shot", 64),
    ],
)
def test_tables_decide(tokens: int, hidden_size: int, algorithm: str, num_blocks: int) -> None:
    plan = choose(tokens, hidden_size)
    assert (plan.algorithm, plan.num_blocks) == (algorithm, num_blocks)
    assert plan.source == "tuned somewhere"
    assert "measured" in plan.reason


WIDE = Table(
    "tuned here",
    {("bfloat16", "norm"): [Curve(4096, (Step(64, "one_shot", 0, 1), Step(None, "one_shot")))]},
)


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "cluster_size"),
    [(64, 4096, 1), (65, 4096, 0), (1, 2056, 1), (1, 2048, 0), (1, 4104, 0), (1, 8192, 0)],
)
def test_blocks_per_row_apply_to_rows_of_that_width(
    tokens: int, hidden_size: int, cluster_size: int
) -> None:
    """Wider rows can need more blocks, and narrower rows can leave blocks without work."""
    assert choose(tokens, hidden_size, tables=(WIDE,)).cluster_size == cluster_size


def test_the_library_chooses_blocks_per_row_if_a_table_does_not_apply() -> None:
    plenty = {"one_shot": 10**6, "two_shot": 10**6}

    def size(requested: str = "auto", **traits: Any) -> int:
        all_traits = policy.Traits("cuda", 4, tables=(WIDE,), **traits)
        return policy.choose(all_traits, 8, 4096, 2, plenty, requested).cluster_size

    assert size() == size(max_row_bytes=65536) == 1
    assert size("one_shot") == size("unfused") == 0, "requested by the caller"
    assert size(max_blocks=64) == 0
    for limit in (8192, 32768):  # the second without clusters, but with several packs per thread
        assert size(max_row_bytes=limit) == 0, "kernels without clusters"


def test_plans_name_the_mode_of_the_measurement() -> None:
    curve = Curve(4096, (Step(None, "one_shot"),), product=7168, product_tokens=1024)
    table = Table("tuned here", {("bfloat16", "norm"): [curve]})
    for tokens, hidden_size, mode in (
        (1024, 4096, "after a GEMM"),
        (1025, 4096, "in a chain of calls"),
        (2048, 2048, "after a GEMM"),
        (2049, 2048, "in a chain of calls"),
    ):
        assert mode in choose(tokens, hidden_size, tables=(table,)).reason
    assert "in a chain of calls" in choose(1, 2048).reason


def test_calls_that_a_table_lacks_use_other_tables() -> None:
    assert choose(1, 2048, "bfloat16", "per_group").algorithm == "two_shot"
    assert choose(1, 2048, "float16", "per_group").algorithm == "two_shot"  # same element size
    assert choose(1, 2048, "bfloat16", "per_token").algorithm == "one_shot"  # like the plain norm
    assert choose(1, 2048, "float32", "norm").source == "default"
    other = Table("seed h200", {("float32", "norm"): [Curve(2048, (Step(None, "two_shot"),))]})
    assert choose(1, 2048, "float32", "norm", tables=(TABLE, other)).source == "seed h200"
    assert choose(1, 2048, tables=(other, TABLE)).source == "tuned somewhere"
    assert choose(1, 2048, tables=()).source == "default"


def test_one_width_alone_does_not_decide_for_all() -> None:
    def source(*widths: int, of: int) -> str:
        curves = [Curve(width, (Step(None, "two_shot"),)) for width in widths]
        table = Table("tuned here", {("bfloat16", "norm"): curves})
        return choose(1, of, tables=(table,)).source

    assert [source(4096, of=n) for n in (2040, 2048, 8192, 8200)] == [
        *("default", "tuned here", "tuned here", "default")
    ]
    assert source(100_000, of=4096) == "default"
    assert source(2880, 4096, of=100_000) == "tuned here"


def test_tables_do_not_admit() -> None:
    """A table sets preferences. It neither decides what can run nor overrides the caller."""
    traits = policy.Traits("cuda", 4, tables=(TABLE,))
    none = {"one_shot": 0, "two_shot": 10}
    plan = policy.choose(traits, 1, 2048, 2, none)
    assert (plan.algorithm, plan.source) == ("unfused", "")
    plenty = {"one_shot": 10, "two_shot": 10}
    for name in names.ALGORITHMS:
        plan = policy.choose(traits, 100, 8192, 2, plenty, name)
        assert (plan.algorithm, plan.num_blocks, plan.source) == (name, 0, "caller")
    assert policy.choose(traits, 1, 2048, 2, plenty, owned_rows=True).algorithm == "two_shot"


# ---- communicators -------------------------------------------------------------------------------

SHAPES = ((1, 64), (3, 64), (16, 64), (17, 64), (40, 128), (5, 4096))


def write(folder: pathlib.Path, world_size: int, *entries: dict[str, Any], **more: Any) -> None:
    name = tuning.device_name(device().type)
    table = document(*entries, **{"device": name, "world_size": world_size, **more})
    tuning.save(tuning.path_of(folder, name, world_size), table)


def created(folder: pathlib.Path) -> tuple[allnorm.Communicator, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = allnorm.Communicator(
            device=device(), tuning_dir=folder, timeout=datetime.timedelta(seconds=30)
        )
    texts = [str(w.message) for w in caught if "tuning table" in str(w.message)]
    return comm, texts


def check_calls(comm: allnorm.Communicator) -> list[policy.Plan]:
    """Checks the results of all calls that a table could change; returns the plans."""
    plans = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            case = Case(shape=shape, dtype=dtype)
            for _ in range(2):
                case.check(comm)
            case.but(quant=allnorm.Fp8PerGroup(32)).check(comm)
            plans.append(comm.plan(*shape, dtype))
    comm.check()
    return plans


@on(cpu=(2, 3), gpu=(2,))
def test_a_communicator_uses_the_table(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    if rank == 0:
        steps = ((2, "two_shot"), (16, "one_shot"), (30, "unfused"), (None, "two_shot"))
        write(tmp_path, world_size, entry(*steps, hidden_size=64))
    torch.distributed.barrier()
    comm, texts = created(tmp_path)
    assert texts == []
    with comm:
        plans = same_on_every_rank(check_calls(comm))
    by_shape = dict(zip(SHAPES, plans[::3], strict=True))
    assert by_shape[1, 64].algorithm == "two_shot"
    assert by_shape[3, 64].algorithm == "one_shot"
    assert by_shape[17, 64].algorithm == "unfused"
    assert by_shape[40, 128].algorithm == "two_shot"
    far = by_shape.pop((5, 4096))  # far from the measured width; a shipped table can have it
    assert not far.source.startswith("tuned")
    for plan in by_shape.values():
        assert plan.source.startswith(f"tuned {tmp_path}")
        assert plan.source.endswith(", 2026-11-21")


@pytest.mark.parametrize("kind", ["different", "one missing", "one corrupt"])
@on(cpu=(2, 3), gpu=(2,))
def test_tables_that_differ_are_used_by_no_rank(
    rank: int, world_size: int, tmp_path: pathlib.Path, kind: str
) -> None:
    """Differing tables are ignored: if each rank used its own, ranks would hang or diverge."""
    own = tmp_path / str(rank)
    algorithm = "one_shot" if rank == 0 else "two_shot"
    if kind == "different":
        write(own, world_size, entry((None, algorithm), hidden_size=64))
    elif kind == "one missing":
        if rank == 1:
            write(own, world_size, entry((None, "unfused"), hidden_size=64))
    else:
        write(own, world_size, entry((None, "unfused"), hidden_size=64))
        if rank == world_size - 1:
            path = next(own.iterdir())
            path.write_text(path.read_text()[:-20])
    comm, texts = created(own)
    with comm:
        plans = same_on_every_rank(check_calls(comm))
    assert not any(plan.source.startswith("tuned") for plan in plans)
    assert len(texts) == (rank == 0), "only rank 0 warns"
    assert all("allnorm tune" in text and "bit-identical" in text for text in texts)


@on(gpu=(2,))
def test_capture_and_replay_choose_alike(
    rank: int, world_size: int, tmp_path: pathlib.Path
) -> None:
    """A graph keeps the choice made at its capture, even if a table is stored later."""
    if rank == 0:
        write(tmp_path, world_size, entry((None, "one_shot"), hidden_size=64))
    torch.distributed.barrier()
    comm, _ = created(tmp_path)
    case = Case(shape=(8, 64))
    arguments = case.call_arguments(comm)
    x = case.x(rank)
    case.check(comm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = comm.all_reduce_add_rms_norm(x, **arguments)
    torch.distributed.barrier()
    if rank == 0:
        write(tmp_path, world_size, entry((None, "two_shot"), hidden_size=64))
    torch.distributed.barrier()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        case.compare(comm, *results)
        assert comm.plan(8, 64).algorithm == "one_shot"
    comm.close()


@on(cpu=(2,), gpu=(2, 4))
def test_any_number_of_blocks(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """Checks that a table can limit a launch's blocks without changing results."""
    for num_blocks in (1, 2, 7, 64, 132, 1000):
        if rank == 0:
            table = entry((None, "two_shot"), hidden_size=64)
            table["steps"][0]["num_blocks"] = num_blocks
            write(tmp_path, world_size, table)
        torch.distributed.barrier()
        comm, _ = created(tmp_path)
        with comm:
            assert comm.plan(8, 64).num_blocks == num_blocks
            check_calls(comm)
            Case(shape=(700, 1024)).check(comm)
        torch.distributed.barrier()


# GPUs use special kernels for launches with fewer blocks than rows.
MANY_ROWS = (
    Case(shape=(301, 2880)),
    Case(shape=(130, 120), dtype=torch.float32, residual=False),
    Case(shape=(200, 1024), dtype=torch.float16, numerics="unrounded"),
    Case(shape=(257, 1024), quant=allnorm.Fp8PerGroup(128), return_normed=True),
    Case(shape=(129, 5760), kind="sentinels"),
    Case(shape=(131, 2944), float32_weight=True, weight_bias=1.0, numerics="transformers"),
    Case(shape=(200, 512), quant=allnorm.Fp8PerToken(), kind="sentinels"),
    Case(shape=(140, 8192), op="all_reduce"),
)


@pytest.mark.long
@on(cpu=(2,), gpu=(2, 4))
def test_any_limit_of_blocks(rank: int, world_size: int, tmp_path: pathlib.Path) -> None:
    """The caller can also limit the number of blocks. The smaller limit applies."""
    table = entry((None, "two_shot"), hidden_size=64)
    table["steps"][0]["num_blocks"] = 40
    if rank == 0:
        write(tmp_path, world_size, table)
    torch.distributed.barrier()
    for max_blocks in (1, 7, 64, 1 << 40):
        with allnorm.Communicator(
            device=device(), tuning_dir=tmp_path, max_blocks=max_blocks
        ) as comm:
            on_gpu = comm.device.type == "cuda"
            asked = comm.plan(8, 64, algorithm="one_shot")
            assert asked.num_blocks == (min(max_blocks, policy.MOST_BLOCKS) if on_gpu else 0)
            if on_gpu and comm.world_size == 2 and max_blocks <= 64:  # no table applies
                assert comm.plan(8, 64).num_blocks == max_blocks
            else:
                assert comm.plan(8, 64).num_blocks == (min(max_blocks, 40) if on_gpu else 40)
            assert comm.plan(8, 64, algorithm="unfused").num_blocks == 0
            check_calls(comm)
            for shape in ((3, 4096), (300, 1024), (17, 16384)):
                for algorithm in ("one_shot", "two_shot"):
                    Case(shape=shape, algorithm=algorithm).check(comm)
            for case in MANY_ROWS:
                for call in range(3):
                    for algorithm in ("one_shot", "two_shot"):
                        dataclasses.replace(case, algorithm=algorithm, call=call).check(comm)


def test_ratio_is_symmetric() -> None:
    assert policy._ratio(3, 7) == policy._ratio(7, 3)
    assert math.isclose(policy._ratio(2, 8), 4.0)
