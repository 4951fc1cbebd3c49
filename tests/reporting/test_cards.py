from __future__ import annotations

from collections.abc import Callable

import pytest
from safetensors.numpy import load_file, save_file

from lit_recon.measures import Measure
from lit_recon.reporting.images import data_uri
from lit_recon.reporting.pages import build_report
from lit_recon.reporting.record import RunRecord
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.tables import gallery
from lit_recon.reporting.writing import write_metrics

MakeRun = Callable[..., RunFolder]


def test_cards_follow_batches_and_hold_the_victim_s_images_and_figures(make_run: MakeRun) -> None:
    record = RunRecord.read(make_run(n=4, batch_size=2, won=3))
    shown = gallery(record)
    assert [(group.title, len(group.cards)) for group in shown.groups] == [
        ("Batch 0 · loss 0.001", 2),
        ("Batch 1 · loss 0.002", 2),
    ]
    last = shown.groups[1].cards[1]
    assert last.title == "#103 · dog"
    assert last.label_note == "label taken for cat"
    assert last.closer is False
    assert (last.rmse, last.nearest_rmse) == ("0.332", "0.200")
    assert last.scores == [("PSNR", "23.0"), ("SSIM", "0.870")]
    assert last.reconstruction == data_uri(record.reconstructions[3])
    assert last.target == data_uri(record.targets[3])
    assert last.nearest_public == data_uri(record.nearest_public[3])
    assert [card.label_note for card in shown.groups[0].cards] == ["", ""]


def test_single_images_are_one_group_without_a_title(make_run: MakeRun) -> None:
    groups = gallery(RunRecord.read(make_run(n=4, batch_size=1))).groups
    assert [(group.title, len(group.cards)) for group in groups] == [("", 4)]


@pytest.mark.parametrize(("n", "compact"), [(24, False), (25, True)])
def test_many_victims_get_small_cards_after_the_best_median_and_worst(make_run: MakeRun, n: int, compact: bool) -> None:
    shown = gallery(RunRecord.read(make_run(n=n, batch_size=1, won=n - 1)))
    assert shown.compact is compact
    extremes = [("Best", "#100 · cat"), ("Median", f"#{100 + n // 2} · cat"), ("Worst", f"#{99 + n} · cat")]
    assert [(card.rank, card.title) for card in shown.extremes] == (extremes if compact else [])
    assert sum(len(group.cards) for group in shown.groups) == n


def test_a_class_without_a_name_is_shown_by_its_number(make_run: MakeRun) -> None:
    for names, titles in (
        (("cat",), ["#100 · cat", "#101 · class 1"]),
        (("7", "9"), ["#100 · class 7", "#101 · class 9"]),
    ):
        shown = gallery(RunRecord.read(make_run(names[0], class_names=names)))
        assert [card.title for card in shown.groups[0].cards] == titles


@pytest.mark.parametrize(("side", "pixelated"), [(8, True), (64, True), (65, False)])
def test_only_small_images_show_their_pixels(make_run: MakeRun, side: int, pixelated: bool) -> None:
    assert gallery(RunRecord.read(make_run(shape=(1, side, side)))).pixelated is pixelated


def test_a_perceptual_score_is_shown_where_it_was_had(make_run: MakeRun) -> None:
    folder = make_run()
    folder.victims.write_text(folder.victims.read_text().replace(",,0.25", ",0.123,0.25"))
    assert gallery(RunRecord.read(folder)).groups[0].cards[0].scores[-1] == ("LPIPS", "0.123")


def test_cards_show_the_metrics_that_a_run_states(make_run: MakeRun) -> None:
    folder = make_run()
    folder.victims.write_text(folder.victims.read_text().replace("ssim", "blur"))
    write_metrics(folder, {"rmse": 0.1}, [Measure("blur", "Blur", decimals=1), Measure("rmse", "RMSE")])
    assert gallery(RunRecord.read(folder)).groups[0].cards[0].scores == [("Blur", "0.9")]


def test_without_public_images_a_card_has_two(make_run: MakeRun) -> None:
    folder = make_run()
    tensors = load_file(folder.reconstructions)
    del tensors["nearest_public"]
    save_file(tensors, folder.reconstructions, {"class_names": "[]"})
    shown = gallery(RunRecord.read(folder))
    assert shown.public is False
    assert shown.groups[0].cards[0].nearest_public == ""


def test_certified_images_are_marked_and_counted(make_run: MakeRun) -> None:
    folder = make_run(n=3, batch_size=1, certified=(True, False, None), metrics={"certified_rate": 1 / 3})
    record = RunRecord.read(folder)
    assert [row.certified for row in record.victims] == [True, False, None]
    (group,) = gallery(record).groups
    assert [card.certified for card in group.cards] == [True, False, None]
    page = build_report(folder.path).read_text()
    assert page.count('<span class="tag yes" title="certified by the attack">certified</span>') == 1
    assert page.count('<span class="tag no" title="not certified by the attack">not certified</span>') == 1
    assert "Images certified" in page
    assert "<small>1 of 3</small>" in page
    plain = build_report(make_run("plain").path).read_text()
    assert "certified" not in plain.lower()
