from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lit_recon.errors import CorruptFileError, MissingDataError
from lit_recon.measures import Measure
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.writing import write_metrics

MakeRun = Callable[..., RunFolder]


def test_a_record_holds_all_that_was_written(make_run: MakeRun) -> None:
    folder = make_run(n=5, batch_size=2)
    record = RunRecord.read(folder.path)
    assert record.settings["knowledge"] == {"labels": False, "batch_norm": "running"}
    assert record.number("psnr") == 21.46
    assert record.text("device") == "a processor"
    assert [row.id for row in record.victims] == [100, 101, 102, 103, 104]
    assert [row.batch for row in record.victims] == [0, 0, 1, 1, 2]
    assert record.victims[4].recovered_label != record.victims[4].label
    assert record.victims[1].scores["rmse"] == 0.02
    assert record.victims[1].scores["lpips"] is None
    assert record.class_names == ["cat", "dog"]
    assert record.reconstructions.dtype == np.float32
    stored = load_file(folder.reconstructions)
    for name in ("reconstructions", "targets", "nearest_public"):
        np.testing.assert_array_equal(getattr(record, name), stored[name])
    assert [(curve.batch, curve.restart) for curve in record.losses] == [(0, 0), (1, 0), (2, 0)]
    assert record.losses[2].values == {"step": [0, 10, 20, 30], "loss": [1, 0.1, 0.01, 0.001]}


@pytest.mark.parametrize(("key", "number", "text"), [("lpips", None, ""), ("absent", None, ""), ("n", 4, "4")])
def test_absent_and_null_figures_are_told_from_numbers(
    make_run: MakeRun, key: str, number: float | None, text: str
) -> None:
    record = RunRecord.read(make_run())
    assert record.number(key) == number
    assert record.text(key) == text


def test_a_fact_is_no_number(make_run: MakeRun) -> None:
    record = RunRecord.read(make_run(metrics={"resumed": True, "rmse": "0.1"}))
    assert record.number("resumed") is None
    assert record.number("rmse") is None


def test_an_empty_cell_of_a_curve_is_nan(make_run: MakeRun) -> None:
    folder = make_run()
    folder.losses.write_text("batch,restart,step,loss,prior\n1,0,0,2,\n0,0,0,1,0.5\n")
    first, second = RunRecord.read(folder).losses
    assert (first.batch, first.values["prior"]) == (0, [0.5])
    assert math.isnan(second.values["prior"][0])


def test_a_run_without_curves_or_class_names_can_be_read(make_run: MakeRun) -> None:
    folder = make_run()
    folder.losses.unlink()
    save_file(load_file(folder.reconstructions), folder.reconstructions)
    record = RunRecord.read(folder)
    assert record.losses == []
    assert record.class_names == []


def test_an_unfinished_run_is_refused_with_the_command_that_finishes_it(make_run: MakeRun) -> None:
    folder = make_run(finished=False)
    with pytest.raises(MissingDataError, match=r"unfinished run .*attack.py run --config .*config\.yaml --out"):
        RunRecord.read(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"nowhere holds no run \(metrics\.json is missing\): check the path"):
        RunRecord.read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.yaml", "victims.csv", "reconstructions.safetensors"])
def test_a_finished_run_that_lost_a_file_is_refused(make_run: MakeRun, name: str) -> None:
    folder = make_run()
    (folder.path / name).unlink()
    with pytest.raises(CorruptFileError, match=f"finished run without {name}"):
        RunRecord.read(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.json", b'{"rmse": 0.', "must be JSON"),
        ("metrics.json", b"[1, 2]", "must hold a JSON object; got list"),
        ("metrics.json", b"\xff\xfe\x00", "must be JSON"),
        ("victims.csv", b"", "must have the columns batch, id, label, recovered_label, loss"),
        ("victims.csv", b"batch,id,label,recovered_label,loss\n0,1,2\n", "line 2 must have 5 cells; got 3"),
        ("victims.csv", b"batch,id,label,recovered_label,loss\n0,1,2,x,0.5\n", "must hold numbers"),
        ("victims.csv", b"batch,id,label,recovered_label,certified,loss\n0,1,2,2,1,0.5\n", "under certified"),
        ("victims.csv", b'batch,id\n"0,1\n', "must be a CSV table"),
        ("victims.csv", b"batch,id,label,recovered_label,loss\n0,1,2,2,0.5\n", "holds 4 images, but victims.csv has 1"),
        ("logs/losses.csv", b"batch,restart,step,loss\n0,0,0,low\n", "must hold numbers"),
        ("logs/losses.csv", b"step,loss\n0,1\n", "must have the columns batch, restart"),
        ("reconstructions.safetensors", b"", "must be a safetensors file of a run"),
        ("reconstructions.safetensors", b"\x80\x04pickled", "must be a safetensors file of a run"),
    ],
)
def test_a_damaged_file_is_named(make_run: MakeRun, name: str, content: bytes, message: str) -> None:
    folder = make_run()
    (folder.path / name).write_bytes(content)
    with pytest.raises(CorruptFileError, match=message) as caught:
        RunRecord.read(folder)
    assert Path(name).name in str(caught.value)


def test_truncated_images_are_refused(make_run: MakeRun) -> None:
    folder = make_run()
    whole = folder.reconstructions.read_bytes()
    folder.reconstructions.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match="must be a safetensors file of a run"):
        RunRecord.read(folder)


@pytest.mark.parametrize("shape", [(4, 1, 8, 8), (4, 8, 8)])
def test_images_of_other_shapes_are_refused(make_run: MakeRun, shape: tuple[int, ...]) -> None:
    folder = make_run()
    tensors = load_file(folder.reconstructions)
    save_file(tensors | {"targets": np.zeros(shape, np.float32)}, folder.reconstructions)
    with pytest.raises(CorruptFileError, match=r"of one shape \(n, c, h, w\)"):
        RunRecord.read(folder)
    del tensors["targets"]
    save_file(tensors, folder.reconstructions)
    with pytest.raises(CorruptFileError, match=r"of one shape \(n, c, h, w\)"):
        RunRecord.read(folder)


def test_a_run_says_how_its_metrics_are_printed(make_run: MakeRun) -> None:
    folder = make_run()
    assert RunRecord.read(folder).measures == {}  # of earlier releases
    stated = [Measure("blur", "Blur", False, 2, "px"), Measure("flicker", "Flicker")]
    write_metrics(folder, {"blur": 0.1}, stated)
    record = RunRecord.read(folder)
    assert list(record.measures.values()) == stated
    assert record.metrics == {"blur": 0.1}


@pytest.mark.parametrize("formats", [[], {"blur": {}}, {"blur": 3}])
def test_malformed_formats_are_refused(make_run: MakeRun, formats: object) -> None:
    folder = make_run()
    folder.metrics.write_text(json.dumps({"rmse": 0.1, "formats": formats}))
    with pytest.raises(CorruptFileError, match="higher_is_better.* of every metric under formats"):
        RunRecord.read(folder)


def test_reports_are_built_without_pytorch_and_the_room_costs_nothing_to_import(make_run: MakeRun) -> None:
    folder = make_run()
    write_metrics(folder, {"rmse": 0.1})
    code = (
        "import sys, lit_recon.reporting\n"
        "assert not {'numpy', 'jinja2', 'PIL', 'torch'} & set(sys.modules)\n"
        "from lit_recon.reporting import pages\n"
        "pages.build_report(sys.argv[1])\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(folder.path)], cwd=root, check=True)
