"""Run folders that were edited by hand: metrics, settings, tables and images of a run, and the files of a study."""

from __future__ import annotations

import functools
import html.parser
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st

from lit_recon.experiments.evaluate.results import Evaluation
from lit_recon.experiments.evaluate.tables import attack_tables
from lit_recon.experiments.pages import build_page
from lit_recon.reporting.record import read_arrays
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import LossCurve, VictimRow, write_losses, write_metrics, write_tensors, write_victims
from tests.fuzzing.harness import Files, Link, Reader
from tests.fuzzing.mutations import altered, damaged, json_text, pick
from tests.fuzzing.payloads import HARMFUL_YAML, MARK, SCRIPTS
from tests.fuzzing.tensor_files import joined, retensored, revalued, split

SETTINGS: dict[str, Any] = {
    "name": "a run",
    "attack": {"class_path": "lit_recon.attacks.updates.GradientMatching", "init_args": {"steps": 30, "priors": []}},
    "client": {"batch_norm": "eval"},
    "knowledge": {"labels": False, "batch_norm": "running"},
    "paper": {"citation": "Somebody, 2020", "values": {"rmse": 0.16}, "note": "Batches of 16."},
}
METRICS: dict[str, Any] = {
    "rmse": 0.25,
    "rmse_std": 0.01,
    "psnr": 21.5,
    "ssim": 0.9,
    "lpips": None,
    "lpips_reason": "its weights are not on this machine",
    "label_accuracy": 0.75,
    "certified_rate": 0.5,
    "baseline_mean_image_rmse": 0.25,
    "baseline_nearest_public_rmse": 0.2,
    "n": 4,
    "n_batches": 2,
    "seconds": 125.0,
    "version_torch": "2.13.0",
    "device": "a processor",
    "command": "python attack.py run --config x.yaml",
    "created": "2026-03-01T12:30:00+00:00",
    "notes": ["The labels were counted."],
}


def make_run(path: Path, settings: Mapping[str, Any] = SETTINGS, rmse: float = 0.25) -> RunFolder:
    """A finished run of four images in two batches."""
    folder = RunFolder.open(path, yaml.safe_dump(dict(settings)))
    targets, found, public = torch.rand(3, 4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4) % 2
    write_tensors(
        folder,
        reconstructions=found,
        targets=targets,
        nearest_public=public,
        labels=labels,
        recovered_labels=labels,
        class_names=("cat", "dog"),
    )
    scores: dict[str, float | None] = {"rmse": rmse, "psnr": 20.0, "nearest_public_rmse": 0.2}
    write_victims(folder, [VictimRow(i // 2, 100 + i, i % 2, i % 2, 0.01, scores, i > 1) for i in range(4)])
    write_losses(folder, [LossCurve(batch, 0, {"step": [0.0, 9.0], "loss": [1.0, 0.1]}) for batch in range(2)])
    write_metrics(folder, {**METRICS, "rmse": rmse})
    return folder


def _contents(write: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        write(root)
        return {
            f"run/{path.relative_to(root)}": path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
        }


@functools.cache
def run_contents() -> dict[str, bytes]:
    """The files of a run."""
    return _contents(make_run)


@functools.cache
def _other_contents() -> dict[str, bytes]:
    """The files of another run, of which one may stand in the first."""
    return _contents(lambda path: make_run(path, {"name": "another", "seed": 1}, 0.05))


_CELLS = ("", "nan", "inf", "-1", "1e400", "true", "x", "0.5", "9" * 400, "=cmd|' /C calc'!A0", *SCRIPTS)


@st.composite
def _table(draw: st.DrawFn, content: bytes) -> bytes:
    """A CSV table with other cells, columns or rows."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, 99)) % len(rows)
        row = rows[number]
        place = draw(st.integers(0, 99)) % max(1, len(row))
        kind = draw(st.sampled_from(("cell", "cell", "cell", "drop", "row", "repeat", "column", "same column")))
        if kind == "cell" and row:
            row[place] = draw(st.sampled_from(_CELLS))
        elif kind == "drop" and row:
            del row[place]
        elif kind == "row" and len(rows) > 1:
            del rows[number]
        elif kind == "repeat":
            rows.append(list(row))
        elif kind == "column":
            name = draw(st.sampled_from((*SCRIPTS, "extra", "")))
            for index, one in enumerate(rows):
                one.append("0.5" if index else f'"{name.replace(chr(34), chr(34) * 2)}"')
        elif kind == "same column" and len(rows[0]) > 1:
            rows[0][place % len(rows[0])] = rows[0][0]
    return "\n".join(",".join(row) for row in rows).encode() + b"\n"


@st.composite
def _yaml(draw: st.DrawFn, content: bytes) -> bytes:
    head, _, rest = content.partition(b"\n")
    changed = draw(altered(yaml.safe_load(rest), values=SCRIPTS))
    try:
        text = yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "replace")
    except yaml.YAMLError:
        text = str(changed).encode("utf-8", "replace")
    first = draw(pick([(9, st.just(head)), (1, st.sampled_from((b"", b"# lit_recon run of `attack.py x`", b"#")))]))
    odd = st.sampled_from([f"a: {text}\n".encode() for text in HARMFUL_YAML] + [b"name: 1\nname: 2\n"])
    return first + b"\n" + draw(pick([(9, st.just(text)), (1, odd)]))


@st.composite
def _images(draw: st.DrawFn, content: bytes) -> bytes:
    """The images with other names of classes, values or shapes."""
    header, body = split(content)
    if draw(st.integers(0, 2)) == 0:
        names = [draw(st.sampled_from((*SCRIPTS, "cat", "\ud800", "a\nb"))) for _ in range(draw(st.integers(0, 3)))]
        odd = st.sampled_from(("[", "{}", "1", '["a", 1]', json.dumps(names), json.dumps(names), "[" * 5000))
        header["__metadata__"] = {"class_names": draw(odd)}
        return joined(json.dumps(header).encode(), body)
    return draw(retensored(content) | revalued(content) | damaged(content))


def _change(name: str, content: bytes) -> st.SearchStrategy[Any]:
    if name.endswith(".json"):
        own = json_text(json.loads(content), values=SCRIPTS)
    elif name.endswith(".yaml"):
        own = _yaml(content)
    elif name.endswith(".csv"):
        own = _table(content)
    else:
        own = _images(content)
    odd: list[Any] = [b"", b"\0", b"\xff\xfe", Link("nowhere"), None]
    return pick([(12, own), (3, damaged(content)), (1, st.sampled_from(odd))])


@st.composite
def edited(draw: st.DrawFn, contents: Callable[[], dict[str, bytes]], others: Callable[[], dict[str, bytes]]) -> Files:
    """The files of a run of which some are edited, removed, or those of another run."""
    files: dict[str, Any] = dict(contents())
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(files)))
        if not isinstance(files[name], bytes):
            continue
        kind = draw(st.sampled_from(("edit", "edit", "edit", "edit", "edit", "edit", "remove", "swap")))
        if kind == "edit":
            files[name] = draw(_change(name, contents()[name]))
        elif kind == "remove":
            del files[name]
        elif name in others():
            files[name] = others()[name]
    return files or {"run": None}


class _Tags(html.parser.HTMLParser):
    """Elements that run scripts, and attributes that do."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.bad.append(f"<{tag}>")
        for name, value in attributes:
            address = (value or "").strip().lower()
            if name.startswith("on") or address.startswith(("javascript:", "data:text/html", "vbscript:")):
                self.bad.append(f"{tag} {name}={value}")


def check_page(path: Path) -> None:
    """A page runs nothing, and shows names from files as they are."""
    page = path.read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(page)
    assert not tags.bad, tags.bad[:3]
    raw = [text for text in SCRIPTS if MARK in text and text in page and "<" in text]
    assert not raw, raw
    assert MARK * 2 not in page, "a template in a name was evaluated"


def _report(folder: Path) -> Path:
    """The page of a run, kept beside it for the check."""
    page = build_page(folder / "run")
    check_page(page)
    pixels = read_arrays(folder / "run" / "reconstructions.safetensors")
    for name in ("reconstructions", "targets"):
        assert ((pixels[name] >= 0) & (pixels[name] <= 1)).all(), f"{name} are shown that are no pixels"
    return page


RUN = Reader(
    "attack.py report",
    "edited run folders",
    edited(run_contents, _other_contents),
    _report,
    short=40,
)


def make_evaluation(path: Path) -> None:
    """Two attacks with and without a defense, and a training of each; one cell failed."""
    folder = RunFolder.open(
        path, yaml.safe_dump({"name": "two", "paper": {"citation": "Some"}, "max_accuracy_drops": [0.1]})
    )
    cells: list[dict[str, Any]] = []
    for defense, strength in (("none", None), ("noise", 0.1)):
        aware = None if strength is None else True
        own = {"defense": defense, "strength": strength, "aware": aware, "paper": None}
        place = f"utility/{defense}-0123"
        write_metrics(RunFolder.open(path / place, "seed: 0"), {"accuracy": 0.9, "final_train_loss": 0.5})
        cells.append({"kind": "utility", "folder": place, "attack": "", "batch_size": 0, **own})
        for attack, rmse in (("near", 0.1), ("far", 0.3)):
            place = f"cells/{defense}-{attack}-b2-0123"
            cells.append({"kind": "attack", "folder": place, "attack": attack, "batch_size": 2, **own})
            if (defense, attack) == ("noise", "far"):
                folder.failure(place).parent.mkdir()
                folder.failure(place).write_text(
                    json.dumps({"reason": "no memory", "applicable": True, "traceback": ""})
                )
            else:
                make_run(path / place, {"seed": 0}, rmse)
    content = {"cells": cells, "attacks": {"near": "Near", "far": "Far"}, "defenses": {"noise": "noise"}}
    content |= {"max_accuracy_drops": [0.1], "malicious": ["far"]}
    folder.grid.write_text(json.dumps(content))


@functools.cache
def _evaluation_contents() -> dict[str, bytes]:
    files = _contents(make_evaluation)
    return {name: own for name, own in files.items() if not name.endswith((".safetensors", "losses.csv"))}


def _read_evaluation(folder: Path) -> Any:
    found = Evaluation.read(folder / "run")
    return found, found.sides, found.levels, attack_tables(found, 2)


EVALUATION = Reader(
    "Evaluation.read",
    "edited studies",
    edited(_evaluation_contents, dict),
    _read_evaluation,
    short=40,
)
