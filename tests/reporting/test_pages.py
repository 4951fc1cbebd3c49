from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_recon.errors import ConfigError, MissingDataError
from lit_recon.reporting import pages
from lit_recon.reporting.pages import build_report, compare_report
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_victims

MakeRun = Callable[..., RunFolder]

VOID = {"meta", "img", "path", "link", "br", "hr", "input"}
NASTY = "<script>alert('1')</script> & \"co\""


class Page(HTMLParser):
    """What a browser would see: tags in balance, text, tables, and everything that could be loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[dict[str, str]] = []
        self.loads: list[str] = []
        self.links: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.style = ""
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        addresses = [value for name, value in attributes.items() if name in ("src", "href", "srcset", "data")]
        (self.links if tag == "a" else self.loads).extend(addresses)
        if tag == "img":
            self.images.append(attributes)
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data

    def row(self, start: str) -> list[str]:
        rows = [row for table in self.tables for row in table if row[0].startswith(start)]
        assert len(rows) == 1
        return [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in rows[0]]


def assert_self_contained(page: Page) -> None:
    assert page.loads
    assert all(address.startswith("data:image/png;base64,") for address in page.loads)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in page.style
    assert "url(" not in page.style
    assert page.tags.count("svg") <= 1


def test_a_report_is_one_file_that_needs_no_other(make_run: MakeRun) -> None:
    folder = make_run()
    path = build_report(folder.path)
    assert path == folder.report
    assert_self_contained(Page(path))


def test_the_images_are_the_run_s_own_pixels(make_run: MakeRun) -> None:
    folder = make_run(n=3, batch_size=3, shape=(3, 6, 5))
    page, record = Page(build_report(folder.path)), RunRecord.read(folder)
    assert len(page.images) == 9
    expected = [
        stack[index] for index in range(3) for stack in (record.targets, record.reconstructions, record.nearest_public)
    ]
    for image, pixels in zip(page.images, expected, strict=True):
        decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))))
        assert np.abs(decoded / 255.0 - pixels.transpose(1, 2, 0)).max() <= 0.5 / 255 + 1e-6
        assert image["alt"]


def test_the_page_says_what_was_attacked_how_well_and_by_what(make_run: MakeRun) -> None:
    page = Page(build_report(make_run("geiping2020", won=3).path))
    for words in (
        "geiping2020",
        "Geiping et al., NeurIPS 2020",
        "3 of 4 reconstructions are closer to the truth than the nearest public image",
        "#103 · dog",
        "label taken for cat",
        "LPIPS is n/a: its weights are not on this machine",
        "The paper's values: Batches of 16.",
        "The running statistics of the BatchNorm layers",
        "python attack.py run --config configs/attack/geiping2020.yaml",
        "2026-03-01 12:30:00 UTC",
        "one line per batch, logarithmic",
    ):
        assert words in page.text
    assert page.text.count("The labels were counted.") == 1


def test_the_tables_hold_the_figures(make_run: MakeRun) -> None:
    page = Page(build_report(make_run().path))
    assert page.row("Metric") == ["Metric", "This run", "Mean public image", "Nearest public image", "Paper"]
    assert page.row("RMSE") == ["RMSE ↓", "0.098± 0.135", "0.251", "0.199", "0.16"]
    assert page.row("PSNR") == ["PSNR ↑", "21.5 dB± 1.1", "–", "–", "–"]
    assert page.row("LPIPS") == ["LPIPS ↓", "n/a", "–", "–", "–"]
    assert page.row("Labels right") == ["Labels right ↑", "75 %", "–", "–", "–"]
    assert page.row("attack.init_args.priors.0.init_args.weight")[1] == "0.1"
    assert page.row("torch") == ["torch", "2.13.0"]
    assert page.row("Time per iteration")[1] == "12.3 ms"


def test_bounds_stand_beside_the_errors_of_the_attack(make_run: MakeRun) -> None:
    bounds = {"bound_rmse": 0.0078, "bound_independent_rmse": 0.0077, "bound_public_rmse": 0.0066}
    folder = make_run(metrics={"bound_clients": 1, "bound_relative_error": 0.0312, "rmse": 0.1, **bounds})
    rows = RunRecord.read(folder).victims
    empty = dict.fromkeys(bounds)
    write_victims(folder, [replace(r, scores={**r.scores, **(empty if r.batch else bounds)}) for r in rows])
    text = Page(build_report(folder.path)).text
    assert "Lower bounds on the error" in text
    assert text.count("0.0077") == 2  # the two images of the client
    assert "about 3\N{NO-BREAK SPACE}%" in text
    assert "no bound:" not in text
    page = Page(
        build_report(
            make_run("open", metrics={"bound_clients": 1, "bound_rmse": None, "bound_rmse_reason": "it is open"}).path
        )
    )
    assert "Unbiased attacks have no bound: it is open." in page.text
    assert "Lower bounds" not in Page(build_report(make_run("without").path)).text


def test_what_users_write_is_shown_and_never_run(make_run: MakeRun) -> None:
    folder = make_run(
        settings={"name": NASTY, "paper": {"citation": NASTY, "note": NASTY, "values": {NASTY: 1, "rmse": NASTY}}},
        class_names=(NASTY, NASTY),
        metrics={"notes": [NASTY], "command": NASTY, "device": NASTY, "lpips_reason": NASTY, "version_x": NASTY},
    )
    page = Page(build_report(folder.path))
    assert_self_contained(page)
    assert page.text.count(NASTY) >= 15
    assert all("<script>" in image["alt"] for image in page.images)
    comparison = compare_report([folder.path, make_run("b", settings={"x": NASTY}).path], folder.path / "c.html")
    assert_self_contained(Page(comparison))


def test_a_run_with_the_least_content_has_a_page_too(make_run: MakeRun) -> None:
    folder = make_run("bare", n=1, settings={"seed": 0}, class_names=())
    folder.metrics.write_text("{}")
    folder.losses.unlink()
    page = Page(build_report(folder.path))
    assert_self_contained(page)
    assert page.tags.count("svg") == 0
    assert "The reconstruction is closer to the truth than the nearest public image." in page.text
    assert page.row("Metric") == ["Metric", "This run", "Mean public image", "Nearest public image"]
    assert "RMSE is n/a: this run did not measure it" in page.text


def test_a_rebuilt_page_is_the_same(make_run: MakeRun) -> None:
    folder = make_run()
    first = build_report(folder.path).read_bytes()
    assert build_report(folder.path).read_bytes() == first


def test_fifty_victims_stay_readable_and_small(make_run: MakeRun) -> None:
    path = build_report(make_run(n=50, batch_size=1, won=19, shape=(3, 32, 32)).path)
    page = Page(path)
    assert len(page.images) == 3 * (50 + 3)
    assert "Best: #100" in page.text
    assert "All 50 images" in page.text
    assert "19 of 50 reconstructions" in page.text
    assert path.stat().st_size < 2_000_000


def test_the_page_adapts_to_phones_print_and_darkness(make_run: MakeRun) -> None:
    path = build_report(make_run().path)
    style = Page(path).style
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in path.read_text(encoding="utf-8")
    for feature in ("prefers-color-scheme: dark", "@media print", "max-width: 480px", "image-rendering: pixelated"):
        assert feature in style
    # Nothing but ornaments is wider than a phone of 320 px.
    assert max(map(int, re.findall(r"min-width: (\d+)px", style)), default=0) <= 300


def test_of_pictures_of_one_name_none_is_lost(tmp_path: Path) -> None:
    """Such as those of two defenses whose titles differ in punctuation alone."""
    first, second, third = (pages.Picture(f"<svg>{n}</svg>".encode(), "", "a.b.svg") for n in range(3))
    panels = [pages.Panel("one", pictures=[first, second]), pages.Panel("two", parts=[pages.Panel(pictures=[third])])]
    for _ in range(2):  # the same names again
        pages.Page("Report", {}, {}, "", panels, {}).write(tmp_path / "report.html")
        written = {path.name: path.read_text() for path in (tmp_path / "figures").iterdir()}
        assert written == {"a.b.svg": "<svg>0</svg>", "a.b_2.svg": "<svg>1</svg>", "a.b_3.svg": "<svg>2</svg>"}


def test_an_unfinished_run_has_no_report(make_run: MakeRun) -> None:
    folder = make_run(finished=False)
    with pytest.raises(MissingDataError, match="unfinished run"):
        build_report(folder.path)
    assert not folder.report.exists()


def test_a_comparison_shows_runs_figures_and_shared_images(make_run: MakeRun, tmp_path: Path) -> None:
    one, two = make_run("one", won=3), make_run("two", won=1, settings={"seed": 5})
    path = compare_report([one.path, two.path], tmp_path / "pages" / "both.html")
    page = Page(path)
    assert path == tmp_path / "pages" / "both.html"
    assert_self_contained(page)
    figures = page.tables[0]
    assert figures[0][:4] == ["Run", "Images", "RMSE\N{NO-BREAK SPACE}↓", "PSNR\N{NO-BREAK SPACE}↑"]
    assert figures[1][:3] == ["one", "4", "0.098± 0.135paper 0.16"]
    assert figures[2][:3] == ["two", "4", "0.244± 0.135"]
    assert [row[-2] for row in figures[1:]] == ["3 of 4", "1 of 4"]
    assert len(page.images) == 4 * 3
    assert page.row("seed")[1:] == ["–", "5"]
    assert [(path.parent / link).resolve() for link in page.links] == [one.report, two.report]
    assert "1 of 4 reconstructions are closer" in page.text


def test_a_comparison_without_shared_images_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [make_run("one", settings={}).path, make_run("two", seed=1, settings={}).path]
    page = Page(compare_report(folders, tmp_path / "c.html"))
    text = page.text
    assert len(page.images) == 2 * 4 * 2  # of each run its targets and reconstructions
    assert "No image was attacked by all of these runs" in text
    assert "the configurations of the runs are equal" in text


def test_a_comparison_refuses_unfinished_runs_and_writes_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [make_run("one").path, make_run("two", finished=False).path]
    with pytest.raises(MissingDataError, match="two holds an unfinished run"):
        compare_report(folders, tmp_path / "c.html")
    assert not (tmp_path / "c.html").exists()


def test_a_comparison_needs_two_runs_and_a_page_to_write(make_run: MakeRun, tmp_path: Path) -> None:
    path = make_run().path
    with pytest.raises(ConfigError, match="two runs or more; got 1"):
        compare_report([path], tmp_path / "c.html")
    for wrong in (tmp_path, path / "victims.csv"):
        with pytest.raises(ConfigError, match=r"written to an \.html file"):
            compare_report([path, path], wrong)
    assert (path / "victims.csv").read_text().startswith("batch")
