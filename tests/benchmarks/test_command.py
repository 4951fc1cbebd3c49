from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks.command import figures, pool_of


def test_figures_of_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"rmse": 0.1}')
    (tmp_path / "victims.csv").write_text("id,rmse,label,note\n7,1e-3,cat,\n8,nan,dog,late\n")

    (tmp_path / "losses.csv").write_text("step,loss\n" + "1,2\n" * 1001)
    found = figures(tmp_path)

    assert found["metrics"] == {"rmse": 0.1}
    assert found["left_out"] == {"losses": "1001 rows"}
    first, second = found["tables"]["victims"]
    assert first == {"id": 7, "rmse": 0.001, "label": "cat"}
    assert (second["note"], second["rmse"] != second["rmse"]) == ("late", True)


def test_the_pool_is_the_configurations(tmp_path: Path) -> None:
    assert pool_of(tmp_path) is None
    for section in ("victims", "split"):
        settings = {"seed": 0, "common": {section: {"seed": 1, "pool": "development"}}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        assert pool_of(tmp_path) == "development"
    settings = {"examples": {"per_class": 2, "pool": "development"}, "seeds": {"first": 0}}  # of `attack.py trainset`
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert pool_of(tmp_path) == "development"
