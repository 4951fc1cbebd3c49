from __future__ import annotations

from benchmarks.shadows import measure, peak_flops


def test_every_way_is_compared_with_the_plain_loop() -> None:
    row = measure(n=20, steps=1, rounds=2, peak=1e7)
    assert row["known_images"] == 20
    assert set(row["ratio"]) == {"vmap", "hand"}
    assert row["ratio"]["hand"]["n"] == 2
    assert set(row["share_of_peak"]) == set(row["models_at_once"]) == {"loop", "vmap", "hand"}
    assert all(share > 0 for share in row["share_of_peak"].values())


def test_the_peak_is_that_of_a_real_processor() -> None:
    assert 1e8 < peak_flops(3) < 1e14
