"""docs/exactness.md is the output of `make exact`; one or two rows of its table per strategy run here."""

import re
from dataclasses import asdict
from itertools import combinations, product

import pytest
from pages import ROOT

from benchmarks.exact import page as exact_page
from benchmarks.exact.compare import BOUNDS, Result, compare, judge
from benchmarks.exact.rows import COLUMNS, Row, is_refused, table_rows
from legato.base.errors import ConfigError

ROWS = table_rows()
CHOSEN = [
    Row("single", "bitwise", kind="batch norm CNN"),
    Row("ddp 2", "bitwise", "bf16-mixed", "transformer", "accumulation", "elastic"),
    Row("ddp 3", kind="padded batches", option="nan=skip"),
    Row("zero1", "bitwise", kind="tied weights"),
    Row("fsdp", "bitwise", "64", "LSTM", "clipping"),
    Row("data x shard", kind="batch norm CNN", option="stream"),
    Row("tensor"),
    Row("tensor", "bitwise", kind="transformer"),
    Row("pipeline", kind="sparse embedding"),
    Row("ddp_model_parallel", option="sync_batchnorm", kind="batch norm CNN"),
    Row("data_parallel", option="accumulation"),
    Row("ddp_rpc", kind="LSTM"),
    Row("tensor", "order", option="manual"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("row", CHOSEN, ids=str)
def test_a_row_stands(row):
    result = judge(row)
    is_expected = ("refused",) if is_refused(asdict(row)) else ("exact",) if row.reproducible == "bitwise" else ()
    assert result.verdict in (is_expected or ("exact", "close")), result


def test_a_page_is_made_of_these_rows_and_columns():
    text = (ROOT / "docs" / "exactness.md").read_text()
    lines = text.partition("## All rows")[2].partition("## Made with")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0] == ["", *COLUMNS, "result"]
    assert [tuple(line[1:-1]) for line in cells[2:]] == [tuple(asdict(row).values()) for row in ROWS]
    assert not [line for line in cells[2:] if re.match("wrong|undeclared|failed", line[-1])]


def test_the_rows_hold_each_pair_that_is_not_refused():
    held = {pair for row in ROWS for pair in combinations(asdict(row).items(), 2)}
    missing = [
        pair
        for left, right in combinations(COLUMNS, 2)
        for pair in product([(left, value) for value in COLUMNS[left]], [(right, value) for value in COLUMNS[right]])
        if pair not in held and not is_refused(dict(pair))
    ]
    # each of these excludes all values of a third column, or belongs to a row that was left out
    assert len(missing) < 13, missing


def test_a_difference_above_rounding_is_wrong(monkeypatch):
    import torch

    from benchmarks.exact import compare as compared

    ours, theirs = {"state_dict.a": torch.ones(3)}, {"state_dict.a": torch.tensor([1.0, 1.0, 1.001])}
    assert list(compare(ours, ours)) == []
    assert next(iter(compare(ours, theirs)))[0] > BOUNDS["32"]
    assert next(iter(compare(ours, {})))[0] == float("inf")
    monkeypatch.setattr(compared, "run_tested", lambda row, root: "ours")
    monkeypatch.setattr(compared, "run_reference", lambda row, root: "theirs")
    monkeypatch.setattr(compared, "contents_of", {"ours": ours, "theirs": theirs}.get)
    assert judge(Row()).verdict == "wrong"
    theirs["state_dict.a"] = torch.tensor([1.0, 1.0, 1.0 + 2**-23])
    assert (judge(Row()).verdict, judge(Row(reproducible="bitwise")).verdict) == ("close", "wrong")


def test_a_refusal_that_is_not_declared_fails_the_table(monkeypatch):
    from benchmarks.exact import compare as compared

    def refuse(row, root):
        raise ConfigError("not here")

    assert judge(Row("pipeline", "bitwise")).verdict == "refused"
    monkeypatch.setattr(compared, "run_tested", refuse)
    assert judge(Row()).verdict == "undeclared"
    monkeypatch.setattr(compared, "run_tested", lambda row, root: "ours")
    monkeypatch.setattr(compared, "run_reference", lambda row, root: "ours")
    monkeypatch.setattr(compared, "contents_of", lambda run_dir: {})
    assert judge(Row("pipeline", "bitwise")).verdict == "undeclared"


def test_a_difference_is_written_as_a_power_of_ten():
    assert exact_page.power(5.6e-7) == "1e-06"
    rows = {Row(): Result("close", "sums across ranks", 5.6e-7), Row(kind="LSTM"): Result("exact")}
    assert "| 32 | 1 exact, 1 close | 32: 1e-06 | - |" in exact_page.by_value("precision", rows)
