"""Attacks on the updates of simulated clients: the Trainer iterates over victims and attacks them in groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import lit_recon._torchvision

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from lit_recon.attacks.base import Attack, AttackState, Way
from lit_recon.clients import ClientSettings
from lit_recon.data import VictimBatch
from lit_recon.defenses import Defense
from lit_recon.errors import ConfigError, UnsupportedModelError
from lit_recon.io.files import write_text
from lit_recon.measures import Measure
from lit_recon.metrics import RMSE, MeanImage, Metric, score_batch
from lit_recon.modules.attack_state import (
    FinishedBatch,
    finished_batches,
    group_name,
    load_finished,
    run_attack,
    save_finished,
)
from lit_recon.modules.data import VictimDataModule
from lit_recon.modules.loggers import log_grid, log_numbers
from lit_recon.modules.scoring import RunScores, ScoredBatch, feature_scores, score_batches
from lit_recon.records import Knowledge, Observation
from lit_recon.reporting.record import read_json
from lit_recon.reporting.wording import format_score
from lit_recon.reporting.writing import Scalar
from lit_recon.training.progress import Progress

#: Victims per group where they are computed together, by type of device; 8 on others.
_TOGETHER = {"cuda": 16}


class UpdateAttackModule(LightningModule):
    """Attacks the update of every client that a `VictimDataModule` yields; `trainer.test(module, victims)` runs it.

    Finished victims and the state of the running attack are saved in the folder `checkpoints`, so that a killed run can
    be resumed. For victims that the attack refuses by an UnsupportedModelError, such as one whose update keeps too few
    entries, a guess stands in; if it refuses all, the first error is raised. `model` is the public model, of which the
    clients send updates; the other arguments are settings of `attack.py run`. Once all victims are done, `metrics` are
    entries of the run's record, the same in every process, `measures` say how to print them, and `scored` are the
    batches of this process.
    """

    def __init__(
        self,
        attack: Attack,
        model: nn.Module,
        clients: ClientSettings,
        defense: Defense | None,
        knowledge: Knowledge,
        checkpoints: Path,
        metrics: Sequence[Metric],
        clients_per_batch: int | Literal["auto"] = "auto",
        save_every_seconds: float = 60.0,
        run: str = "",
    ) -> None:
        super().__init__()
        self.attack, self.model, self.knowledge = attack, model, knowledge
        self.clients, self.defense = clients, defense
        self.checkpoints, self.clients_per_batch = checkpoints, clients_per_batch
        self.save_every_seconds, self.run = save_every_seconds, run
        self.scores = RunScores(metrics)
        self.metrics: dict[str, Scalar] = {}
        self.measures: list[Measure] = []
        self.scored: list[ScoredBatch] = []
        self.execution: Way | None = None  # how several victims are computed, if it was measured
        self._steps = attack.planned_steps
        self.together = 1  # victims per group; where several are computed together, others round differently
        self._group: list[VictimBatch] = []
        self._seen: list[VictimBatch] = []
        self._refused: dict[int, UnsupportedModelError] = {}  # by index of the victim

    @property
    def _victims(self) -> VictimDataModule:
        victims = getattr(self.trainer, "datamodule", None)
        if not isinstance(victims, VictimDataModule):
            raise ConfigError("UpdateAttackModule attacks the victims of a VictimDataModule: pass it to trainer.test")
        return victims

    def on_test_start(self) -> None:
        """Set up clients, load finished victims, and decide how many victims are attacked together."""
        victims = self._victims
        self.scores.rehearse(victims.test.pixels(victims.batches[0]))
        self.client = self.clients.client(self.model, self.defense)
        self._done = load_finished(self.checkpoints, self.run)
        with torch.enable_grad():
            self._plan()
        self.together = victims.shares.group_by(self.together)
        mine = len(victims.shares.positions)
        self._progress = Progress(self._steps * mine, "attack", "iterations", quiet=not self.trainer.is_global_zero)

    def test_step(self, batch: VictimBatch, batch_idx: int) -> None:
        """Collect a group of clients, and attack it once it is complete."""
        self._seen.append(batch)
        if batch.index in self._done:
            self._progress.skip(self._steps)
            return
        if self._group and self._group[0].index // self.together != batch.index // self.together:
            self._attack_group()
        self._group.append(batch)

    def on_test_epoch_end(self) -> None:
        """Attack the last group, then score everything."""
        if self._group:
            self._attack_group()
        self._progress.close()
        self._guess_refused()
        done, public = [self._done[batch.index] for batch in self._seen], self._victims.public.images
        self.scored = score_batches(done, self._seen, public, self.scores.metrics)
        self.scores.update(self.scored)
        self.metrics = self.scores.record()
        self.measures = self.scores.measures(self.metrics)
        log_numbers(self.trainer.loggers, self.metrics, self._progress.done)

    def _attack_group(self) -> None:
        """Attack the group, or each of its victims by itself if it is refused as a whole."""
        group, self._group = self._group, []
        try:
            self._attack(group)
        except UnsupportedModelError as error:
            if len(group) == 1:
                self._refused[group[0].index] = error
                self._progress.total -= self._steps
                return
            for batch in group:
                self._group = [batch]
                self._attack_group()

    def _attack(self, group: list[VictimBatch]) -> None:
        indices = [batch.index for batch in group]
        saved, before = self.checkpoints / f"{group_name(indices)}.pt", self._progress.done
        with torch.enable_grad():
            observations = [self._observe(batch.images, batch.labels, batch.index) for batch in group]
            watch = partial(self._watch, len(group))
            outcome = run_attack(
                self.attack, observations, saved, self.save_every_seconds, self.execution, watch, self.run
            )
        if self._progress.done == before:  # the attack computes in one piece
            self._progress.advance(self._steps * len(group))
        # FirstApplicable may have used an attack with another number of steps
        self._progress.total += self._progress.done - before - self._steps * len(group)
        scores = [
            feature_scores(self.scores.metrics, seen, result, batch.images, self.client)
            for seen, result, batch in zip(observations, outcome.reconstructions, group, strict=True)
        ]
        finished = finished_batches(indices, outcome, scores)
        save_finished(self.checkpoints, finished, self.run)
        saved.unlink(missing_ok=True)
        self._done |= {batch.index: batch for batch in finished}
        self._show(group, finished)

    def _guess_refused(self) -> None:
        """Let a guess stand in for victims that the attack refused, or raise its first error if it refused all.

        The guess knows nothing of the update: the mean of public images, and class 0 if labels are not given.
        """
        attacked = self.trainer.strategy.reduce(
            torch.tensor(float(len(self._done)), device=self.device), reduce_op="sum"
        )
        if not self._refused:
            return
        if not attacked:
            raise next(iter(self._refused.values()))
        mean = MeanImage.from_images(self._victims.public.images)
        for batch in self._seen:
            if batch.index in self._refused:
                why, labels = str(self._refused[batch.index]), batch.labels.cpu()
                images = mean.query(batch.images.cpu()).contiguous()
                guess = labels if self.knowledge.labels else torch.zeros_like(labels)
                self._done[batch.index] = FinishedBatch.guessed(batch.index, images, guess, why)
                save_finished(self.checkpoints, [self._done[batch.index]], self.run)

    def _observe(self, images: Tensor, labels: Tensor, index: int) -> Observation:
        return self.client.observe(images, labels, self.knowledge, self.clients.generator(index))

    def _watch(self, n: int, state: AttackState, new: int) -> None:
        """Count an iteration on `n` clients, and log the newest point of the loss curves, if there is one."""
        if new == 0:
            self._progress.skip(state.step * n)
            return
        self._progress.advance(new * n, loss=state.loss)
        curves = [curve for restarts in state.curves for curve in restarts if curve]
        noted = [curve for curve in curves if curve["step"][-1] == state.step - 1]
        if noted:
            means = {key: sum(curve[key][-1] for curve in noted) / len(noted) for key in noted[0] if key != "step"}
            log_numbers(self.trainer.loggers, means, self._progress.done)

    def _show(self, group: list[VictimBatch], finished: list[FinishedBatch]) -> None:
        from lit_recon.reporting.images import image_grid

        for batch, done in zip(group, finished, strict=True):
            found = done.reconstruction
            scores = score_batch(found.images, batch.images, found.labels, batch.labels, [RMSE()])
            rmse = float(scores.per_image["rmse"].mean())
            self._progress.write(f"victim {batch.index + 1}: RMSE {format_score('rmse', rmse)}, loss {found.loss:.3g}")
            grid = image_grid({"target": batch.images.cpu().numpy(), "found": scores.reconstructions.numpy()})
            log_numbers(self.trainer.loggers, {"victim_rmse": rmse}, self._progress.done)
            log_grid(self.trainer.loggers, "images", grid, self._progress.done)

    @property
    def notes(self) -> list[str]:
        """What the report says of how victims were grouped, where that can change their images; nothing else does."""
        if self.execution is None and self.together == 1:
            return []
        how = "one by one" if self.together == 1 else f"in groups of {self.together}"
        why = "" if self.execution is None else ", as was measured to be faster"
        again = f"clients_per_batch: {self.together}" + (f" and execution: {self.execution}" if self.execution else "")
        where = "Other groups round differently, which changes pixels where an attack has not converged"
        return [f"Victims were computed {how}{why}. {where}; {again} repeats these."]

    def _plan(self) -> None:
        """Fix the size of groups and how they are computed; a resumed run uses the measurement of the first one."""
        asked = self.clients_per_batch
        limit = _TOGETHER.get(self.device.type, 8) if asked == "auto" else asked
        n = min(limit, len(self._victims.batches))
        execution = self.attack.execution_for(n)
        if execution is None:
            return
        if execution == "auto":
            self.execution = execution = self._remembered_execution(n)
        self.together = limit if asked != "auto" or execution == "vmap" else 1

    def _remembered_execution(self, n: int) -> Way:
        path, measured = self.checkpoints / "execution.json", None
        if self.trainer.is_global_zero:
            if not path.is_file():
                test, ids = self._victims.test, self._victims.batches[:n]
                batches = [(test.pixels(some).to(self.device), test.labels[some].to(self.device)) for some in ids]
                seen = [self._observe(*batch, index) for index, batch in enumerate(batches)]
                write_text(path, json.dumps({"execution": self.attack.measured_execution(seen)}))
            measured = read_json(path, "delete it").get("execution")
        return "vmap" if self.trainer.strategy.broadcast(measured) == "vmap" else "loop"
