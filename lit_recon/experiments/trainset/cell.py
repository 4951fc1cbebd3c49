"""One cell of a study of training sets: attack one released model from one kind of start, and score."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_recon.attacks.base import Curve
from lit_recon.attacks.trainset.base import Candidates, ReleasedModel
from lit_recon.attacks.trainset.training import Training
from lit_recon.errors import ThreatModelError, UnsupportedModelError
from lit_recon.experiments.engine.pieces import Piece
from lit_recon.experiments.trainset import score
from lit_recon.experiments.trainset.released import (
    MODEL_FILE,
    MODEL_FORMAT,
    ModelTraining,
    TrainingSet,
    candidates_of,
    network_of,
    read_released,
    training_set,
)
from lit_recon.experiments.trainset.settings import TrainsetCell, TrainsetSettings
from lit_recon.io.files import write_text
from lit_recon.io.tensors import TensorFormat
from lit_recon.modules.attack_state import run_attack
from lit_recon.records import Reconstruction
from lit_recon.reporting.record import read_json
from lit_recon.training.progress import Progress

#: Files of a cell.
RESULTS, IMAGES = "results.json", "reconstructions.safetensors"
IMAGES_FORMAT = TensorFormat("lit_recon.trainset_images", "file of candidates", "delete it and run the study again")
_RUN_FORMAT = TensorFormat("lit_recon.trainset_run", "finished restart", "delete it and run the study again")
#: What an attack says that does not apply to a model.
REFUSED = (ThreatModelError, UnsupportedModelError)
#: Points of a curve that are kept.
_POINTS = 200


@dataclass(frozen=True)
class RestartResult:
    """The result of one start: candidates `(m, c, h, w)` in [0, 1], what the attacker sees of them, and the cost.

    Attributes:
        images, labels: the candidates.
        certified: `(m,)`, which of them the attack takes for exact; None for an attack that never does.
        loss: the attack's own.
        curve: equally long lists by name, thinned; the first entries belong to the start.
        notes: of the attack.
        seconds: computing time, with interrupted processes.
    """

    images: Tensor
    labels: Tensor
    certified: Tensor | None
    loss: float
    curve: Curve
    notes: list[str]
    seconds: float


@dataclass(frozen=True)
class TrainsetCellRun:
    """The work of a cell of a study, in the study's folder."""

    settings: TrainsetSettings
    cell: TrainsetCell
    training: Training

    @property
    def piece(self) -> Piece:
        """The piece of the study."""
        needs = (self.cell.model.folder,)
        return Piece(self.cell.folder, self.cell.describe(), self, needs, results=(RESULTS,), not_applicable=REFUSED)

    def __call__(self, folder: Path) -> str:
        """Attack, or go on where an earlier process stopped; number of good reconstructions and their SSIM in words."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        model = folder.parent.parent / self.cell.model.folder
        work = _Work(self, folder, model)
        found = work.measured()
        write_text(folder / RESULTS, json.dumps(found, indent=1, allow_nan=False))
        own = found["scores"]
        return f"{own['n_good']} of {own['n']} with SSIM above {score.GOOD}, best {score.BEST}: {own['best_ssim']:.3f}"


@dataclass(frozen=True)
class _Work:
    run: TrainsetCellRun
    folder: Path
    model: Path

    @cached_property
    def examples(self) -> TrainingSet:
        return training_set(self.run.settings, self.run.cell.model.seed)

    def seen(self, path: Path, n: int) -> ReleasedModel:
        """What the attacker sees of a model that was trained on `n` images."""
        network = network_of(self.run.settings, self.examples, self.run.cell.model.seed)
        return read_released(self.run.settings, self.run.training, self.examples, network, path, n)

    def start(self, seen: ReleasedModel, restart: int) -> Candidates:
        cell, settings = self.run.cell, self.run.settings
        kind = settings.starts[cell.start]
        return candidates_of(settings, seen, self.examples, kind, cell.share, cell.model.seed, restart)

    def measured(self) -> dict[str, Any]:
        """The cell's results as JSON content; writes its images."""
        began, cell, examples = time.perf_counter(), self.run.cell, self.examples
        seen = self.seen(self.model / MODEL_FILE, examples.n_examples)
        starts = [self.start(seen, number) for number in range(cell.restarts)]
        restarts = [self.restart(start, f"restart_{number}") for number, start in enumerate(starts)]
        mean, truth = examples.mean, examples.images
        pools = [one.images for one in restarts]
        pool = torch.cat(pools)
        found = score.score_pool(truth, pool, mean)
        claims, untested = self.claims(pools)
        header = MODEL_FORMAT.read_header(self.model / MODEL_FILE)
        started = torch.cat([start.images for start in starts])
        at_start = score.score_pool(truth, started.clamp(0, 1), mean)
        images = {"candidates": pool, "matched": pool[found.nearest], "truths": truth}
        extra = {"labels": examples.labels, "candidate_labels": torch.cat([one.labels for one in restarts])}
        IMAGES_FORMAT.write(self.folder / IMAGES, {**{k: v.float() for k, v in images.items()}, **extra}, {})
        bases = self.baselines(found.pool)
        return {
            **cell.identity(),
            "start_described": self.run.settings.starts[cell.start].describe(cell.share),
            "model": {name: header[name] for name in ("loss", "steps", "accuracy", "seconds", "epsilon")},
            "pool": found.pool,
            "certified": self.certified(restarts),
            "scores": found.scores.summary(),
            "scores_at_start": at_start.scores.summary(),
            "baselines": {name: own.summary() for name, own in bases.items()},
            "n_public": len(examples.public),
            "images": self._rows(found, bases["nearest public image"]),
            "restarts": [self._selected(seen, start, one) for start, one in zip(starts, restarts, strict=True)],
            "selections": score.selections(
                [Reconstruction(one.images, one.labels, one.loss) for one in restarts], truth, mean
            ),
            "neighbours": score.neighbours(pool, truth, examples.others, mean),
            "claims": [asdict(claim) for claim in claims],
            "notes": list(dict.fromkeys([*(note for one in restarts for note in one.notes), *untested])),
            "seconds": time.perf_counter() - began,
            "attack_seconds": sum(one.seconds for one in restarts),
        }

    def certified(self, restarts: Sequence[RestartResult]) -> dict[str, int] | None:
        """Counts of certified candidates of all restarts; None where the attack certifies none, whatever it finds."""
        sure = [one.images[one.certified.to(one.images.device)] for one in restarts if one.certified is not None]
        if not sure:
            return None
        return score.certified(torch.cat(sure), self.examples.images, self.examples.known_images)

    def baselines(self, pool: int) -> dict[str, score.PairScores]:
        """Scores without an attack; all cells of a model share them in a file beside it."""
        path = self.model / f"baselines_{pool}.json"
        if not path.is_file():
            found = score.baselines(self.examples.images, self.examples.public, self.examples.mean, pool)
            write_text(path, json.dumps({name: asdict(own) for name, own in found.items()}))
        return {name: score.PairScores(**own) for name, own in read_json(path).items()}

    def restart(self, start: Candidates, name: str) -> RestartResult:
        """The attack from one start; read from its file where it has finished before."""
        path, state = self.folder / f"{name}.safetensors", self.folder / f"{name}.pt"
        if path.is_file():
            header, tensors = _RUN_FORMAT.read(path)
            images, labels = tensors["images"].to(start.like), tensors["labels"].to(start.like.device)
            own = {key: header[key] for key in ("loss", "curve", "notes", "seconds")}
            return RestartResult(images=images, labels=labels, certified=tensors.get("certified"), **own)
        attack = self.run.settings.attacks[self.run.cell.attack]
        progress = Progress(attack.steps, f"{self.run.cell.describe()}, {name}", "steps")

        def watch(running: Any, steps: int) -> None:
            if steps:
                progress.advance(steps, loss=running.loss)
            else:
                progress.skip(running.step)

        outcome = run_attack(attack, [start], state, self.run.settings.save_every_seconds, None, watch)
        progress.close()
        [result], [curves] = outcome.reconstructions, outcome.curves
        curve = thinned(curves[0] if curves else {})
        facts = {"loss": float(result.loss), "curve": curve, "notes": list(result.notes), "seconds": outcome.seconds}
        tensors = {"images": result.images, "labels": result.labels}
        if result.certified is not None:
            tensors["certified"] = result.certified
        _RUN_FORMAT.write(path, tensors, facts)
        state.unlink(missing_ok=True)
        return self.restart(start, name)

    def claims(self, pools: Sequence[Tensor]) -> tuple[list[score.MemberClaim], list[str]]:
        """The test whether reconstructions show members, where it is part of the study, and where it cannot be made."""
        test, cell, examples = self.run.settings.membership, self.run.cell, self.examples
        if test is None or not test.covers(cell.attack, cell.start):
            return [], []
        if (parts := self.run.training.parts) > 1:
            told = f"those of a training in {parts} parts would be in other parts"
            return [], [f"Not tested whether training images show: without one of them, {told}."]
        n = min(test.tested, len(examples.labels))
        members = score.closest(examples.images, pools, examples.mean, n)
        others = score.closest(examples.others, pools, examples.mean, n)
        found, untested = list[score.MemberClaim](), list[str]()
        # each other image is tested with the model from which a member is missing, as a placebo
        for (index, restart), (other, other_restart) in zip(members, others, strict=True):
            try:
                without = [self.pool_without(index, number) for number in (restart, other_restart)]
            except REFUSED as error:  # the attack on the released model itself has its result
                untested.append(f"Not tested whether training image {index} shows, on a model without it: {error}.")
                continue
            for image, which, number, is_member, pool in (
                (examples.images[index], index, restart, True, without[0]),
                (examples.others[other], other, other_restart, False, without[1]),
            ):
                near = float(score.distances(image[None], pools[number]))
                far = float(score.distances(image[None], pool))
                claimed = far > (1 + test.margin) * near
                found.append(score.MemberClaim(is_member, which, number, index, near, far, claimed))
        return found, untested

    def pool_without(self, index: int, restart: int) -> Tensor:
        """Candidates of the attack from the same start on the model that was trained without one image."""
        trained = ModelTraining(self.run.settings, self.run.cell.model, self.run.training)
        path = trained.without(self.model, self.examples, index)
        seen = self.seen(path, self.examples.n_examples - 1)
        return self.restart(self.start(seen, restart), f"without_{index}_{restart}").images

    def _rows(self, found: score.PoolScore, public: score.PairScores) -> list[dict[str, Any]]:
        scores = asdict(found.scores)
        per_restart = found.pool // self.run.cell.restarts
        return [
            {
                "image": place,
                "id": int(self.examples.ids[place]),
                "label": int(self.examples.labels[place]),
                "candidate": int(nearest) % per_restart,
                "restart": int(nearest) // per_restart,
                **{name: values[place] for name, values in scores.items()},
                **{f"nearest_public_{name}": values[place] for name, values in asdict(public).items()},
            }
            for place, nearest in enumerate(found.nearest)
        ]

    def _selected(self, seen: ReleasedModel, start: Candidates, one: RestartResult) -> dict[str, Any]:
        own = score.score_pool(self.examples.images, one.images, self.examples.mean).scores.summary()
        ends = {
            "before": score.stationarity(seen, start.images, start.labels),
            "after": score.stationarity(seen, one.images, one.labels),
        }
        begun = start.images.to(one.images).clamp(0, 1)
        return {
            "loss": one.loss,
            "scores": own,
            "stationarity": ends,
            "moved": float((one.images - begun).flatten(1).square().mean(dim=1).sqrt().mean()),
            "to_member": float(score.distances(one.images, self.examples.images.to(one.images)).mean()),
            "curve": one.curve,
            "seconds": one.seconds,
        }


def thinned(curve: Curve) -> Curve:
    """At most some 200 points of a curve, the first and the last among them."""
    n = len(next(iter(curve.values()), []))
    places = sorted({round(place * (n - 1) / (_POINTS - 1)) for place in range(_POINTS)}) if n else []
    return {name: [values[place] for place in places] for name, values in curve.items()}
