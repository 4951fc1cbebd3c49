"""Numbers of pages and the records that they are from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.docs import tables
from benchmarks.docs.figures import FigureError, Figures, shown
from benchmarks.docs.marks import NOT_MEASURED, Page, examine
from benchmarks.docs.tables import make, markdown, table
from benchmarks.record import ROOT

ROWS = [
    {"batch": 1, "mode": "eval", "seconds": {"median": 1.918}, "angles": ["3e-15", "1e-16"]},
    {"batch": 4, "mode": "eval", "seconds": {"median": 18.77}, "angles": ["5e-8"]},
    {"batch": 4, "mode": "train", "seconds": {"median": 11.41}, "angles": [], "note": "late"},
]


def keep(folder: Path, name: str, rows: list[dict[str, Any]], again: int = 1, **changes: Any) -> None:
    """A record as `benchmarks.record` writes it, as far as pages read it."""
    content = {"name": name, "pool": "evaluation", "partial": False, "device": "a CPU", "rows": rows, **changes}
    content.setdefault("created", f"2026-11-22T10:00:{again:02d}+00:00")
    (folder / f"2026-11-22-{name}-a-cpu-{again}.json").write_text(json.dumps(content))


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    folder = tmp_path / "results"
    folder.mkdir()
    keep(folder, "maps", ROWS)
    keep(folder, "digits", [{"seconds": 8.25, "metrics": {"mse": 0.5}}])
    keep(folder, "digits", [{"seconds": 8.25, "metrics": {"mse": 0.00142, "a.0.1.b1": 0.995, "n": 200}}], 2)
    for n, rate in enumerate((0.995, 0.98, 0.975)):
        keep(folder, f"draw_{n}", [{"metrics": {"rate": rate, "hits": round(200 * rate)}}])
    keep(folder, "stopped", [{"x": 1.5}], partial=True)
    keep(folder, "tuned", [{"x": 1.5}], pool="development")
    return Figures(folder)


def page(tmp_path: Path, figures: Figures, text: str) -> Page:
    path = tmp_path / "page.md"
    path.write_text(text)
    return examine(path, figures, make)


def test_older_records_of_a_name_are_found_where_all_are_asked_for(figures: Figures) -> None:
    assert [len(figures.find(name)) for name in ("digits", "all digits", "all d**", "all stopped")] == [1, 2, 5, 0]
    assert [record["rows"][0]["metrics"]["mse"] for record in figures.find("all digits")] == [0.5, 0.00142]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("digits: metrics.mse .4f", "0.0014"),  # of the newer record
        ("digits: rows[0].seconds .1f", "8.2"),
        ("digits: metrics.a.0.1.b1 .1%", "99.5 %"),  # a key with dots
        ("maps: rows[batch=4,mode=eval].seconds.median .1f", "18.8"),
        ("maps: rows[batch=4,note=].seconds.median .1f", "18.8"),  # the row without a note
        ("max maps: rows[batch=1].angles error", "3e-15"),
        ("max maps: rows.seconds.median .0f", "19"),
        ("sum draw_*: metrics.hits d", "590"),
        ("mean draw_*: metrics.rate .1%", "98.3 %"),
        ("mean dra**: metrics.rate .1%", "98.3 %"),
        ("sum digits**: metrics.n d", "200"),  # `**` may stand for nothing
    ],
)
def test_an_expression_finds_its_figure(figures: Figures, expression: str, text: str) -> None:
    assert figures.text(expression) == text


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("maps rows", "not of the form"),
        ("nobody: x .1f", "no complete record nobody"),
        ("stopped: x .1f", "no complete record stopped"),
        ("tuned: x .1f", "pool development"),
        ("digits: metrics.rmse .1f", "has no metrics.rmse"),
        ("maps: rows[batch=4].seconds.median .1f", "2 values"),
        ("digits: metrics .1f", "no number"),
        ("maps: device .1f", "no number"),
        ("max maps: rows[mode=train].angles .1f", "no number"),
    ],
)
def test_an_expression_without_a_figure_is_refused(figures: Figures, expression: str, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        figures.text(expression)


def test_formats() -> None:
    found = [shown(value) for value in (0.1234, 4.4e-8, 0.0, None, 0.00099)]
    assert found == ["0.123", "4e-8", "0", "–", "1e-3"]
    assert (shown(1234.5, ",.0f"), shown(0.5, ".0%"), shown(True, "d")) == ("1,234", "50 %", "1")


def test_numbers_before_a_mark_are_replaced(tmp_path: Path, figures: Figures) -> None:
    text = "Of 100 images 98 %, mean 0.5 in 8.0 s\n<!-- = digits: metrics.mse .4f; digits: rows[0].seconds .1f -->.\n"
    found = page(tmp_path, figures, text.replace("98 %", "`98 %`"))
    assert found.text == text.replace("98 %", "`98 %`").replace("0.5 in 8.0", "0.0014 in 8.2")
    assert found.problems == [
        (1, "digits: metrics.mse .4f: expected 0.0014, found 0.5"),
        (1, "digits: rows[0].seconds .1f: expected 8.2, found 8.0"),
    ]
    again = page(tmp_path, figures, found.text)
    assert (again.problems, again.checked, again.text) == ([], 2, found.text)


@pytest.mark.parametrize(
    "claim",
    [
        "an error of 0.5",
        "in 98 % of cases",
        "up to 3e-15",
        "| 17 | 0.221 |",
        "in 17 seconds",
        "takes 20 ms",
        "at 26 dB",
        "with 10 GiB",
        "half an hour",
        "two minutes of one core",
        "the two\nminutes",
        "199 of 200 images",
        "```console\n$ make demo  # three minutes\n```",
        "```console\n$ make demo  # some 20 seconds\n```",
        "Text <!-- a comment that is no mark -->",
        "The paper prints 0.1 <!-- paper: table 2 -->. We have 0.2",
        "0.2. The paper prints 0.1 <!-- paper: table 2 -->.",
        "| 0.2 | 0.1 <!-- paper: table 2 --> |",
        "0.0014 and 0.0014 <!-- = digits: metrics.mse .4f -->",
        "no number <!-- = digits: metrics.mse .4f -->",
        "0.0014 <!-- = nobody: metrics.mse .4f -->",
        "1.5 <!-- = stopped: x .1f -->",
        "1.5 <!-- = tuned: x .1f -->",
        "0.0015 <!-- = digits: metrics.mse .4f -->",
    ],
)
def test_a_claim_without_its_record_is_found(tmp_path: Path, figures: Figures, claim: str) -> None:
    found = page(tmp_path, figures, f"First line.\n\n{claim}\n")
    assert len(found.problems) == 1
    assert found.problems[0][0] in (3, 4)  # 4: inside a code block


@pytest.mark.parametrize(
    "text",
    [
        "Of `0.5` and 16 images, page [one](docs/1.0.md), 24x24 pixels, ResNet-18, Apache-2.0, 4,096 neurons",
        "with 95 % intervals and a 95 %\nconfidence interval",
        "The paper prints 0.15 to 0.17 <!-- paper: table 4 --> with 0.2 <!-- paper: table 5 -->.",
        "| a | 0.1 <!-- paper: table 2 --> | 0.2 <!-- paper: table 2 --> |",
        "```python\nrate = 0.5\n```",
        "```console\n$ python attack.py run --rate 0.5  # hours\n```",
        "``0.5 ` 0.6``",
    ],
)
def test_settings_and_quotations_are_free(tmp_path: Path, figures: Figures, text: str) -> None:
    assert page(tmp_path, figures, text).problems == []


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table by the name `errors` of the record `digits`, and one of `nobody`."""
    monkeypatch.setattr(tables, "_TABLES", {})
    for name in ("digits", "stopped", "tuned", "draw_*"):

        @table(f"errors_{name.strip('_*')}", name)
        def build(found: Any) -> str:
            return markdown(["", "MSE"], [["ours", shown(found["rows"][0]["metrics"]["mse"], ".4f")]])


@pytest.mark.usefixtures("errors")
def test_a_table_is_written_once_its_record_is_complete(tmp_path: Path, figures: Figures) -> None:
    text = "# Title\n\n<!-- table: errors_{} -->\n<!-- end -->\n\nText.\n"
    path = ROOT / "docs" / "page.md"
    lines = make("errors_digits", figures, path)
    assert lines.startswith("| | MSE |".replace("| |", "|  |"))
    assert "| ours | 0.0014 |" in lines
    assert "2026-11-22, a CPU: [digits](../benchmarks/results/2026-11-22-digits-a-cpu-2.json)" in lines
    assert "pool `evaluation`" in lines
    stopped = page(tmp_path, figures, text.format("stopped"))
    assert f"-->\n\n{NOT_MEASURED}\n\n<!--" in stopped.text
    assert page(tmp_path, figures, stopped.text).unmeasured == ["errors_stopped"]
    [(line, message)] = page(tmp_path, figures, text.format("tuned")).problems
    assert (line, "pool development" in message) == (3, True)
    [(line, message)] = page(tmp_path, figures, text.format("unknown")).problems
    assert (line, "no such table" in message) == (3, True)


def test_many_records_of_a_table_are_not_listed(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_TABLES", {})
    table("all", "all d**")(lambda found: markdown(["n"], [[str(len(found))]]))
    path = ROOT / "docs" / "page.md"
    assert make("all", figures, path).count("](../benchmarks/results/") == 5
    monkeypatch.setattr(tables, "_FEW", 4)
    said = "a CPU: 5 records in `benchmarks/results` whose names begin with `digits` or `draw_`."
    assert said in make("all", figures, path)


@pytest.mark.usefixtures("errors")
def test_an_edited_table_is_found_where_it_was_edited(
    tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.docs.tables.link", lambda record, page: record["name"])
    found = page(tmp_path, figures, "<!-- table: errors_digits -->\n<!-- end -->\n")
    assert page(tmp_path, figures, found.text).problems == []
    [(line, message)] = page(tmp_path, figures, found.text.replace("0.0014", "0.0013")).problems
    assert found.text.splitlines()[line - 1] == "| ours | 0.0014 |"
    assert "expected '| ours | 0.0014 |', found '| ours | 0.0013 |'" in message
