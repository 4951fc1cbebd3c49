"""Guards, and values at the edge of their range."""

from __future__ import annotations

from lit_recon.attacks.glm.training import LeastSquares, attack_record
from tests.attacks.glm.test_training import _digits


def test_a_single_record_is_not_told_apart_from_another() -> None:
    images, labels = _digits()
    released = LeastSquares().fit(images, labels).released
    found = attack_record(released, images[1:], labels[1:])
    assert (found.other, found.told, found.refusal) == (None, False, "")
    refused = attack_record(released, images[2:], labels[2:])
    assert refused.found is None or refused.told is False
