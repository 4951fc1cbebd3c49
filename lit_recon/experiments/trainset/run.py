"""`attack.py trainset`: train and release models, reconstruct their training sets, score and report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.trainset.base import ReleasedModel
from lit_recon.attacks.trainset.training import Training
from lit_recon.errors import LitReconError, ThreatModelError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import SAME_RUN, settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.pieces import Piece
from lit_recon.experiments.engine.runner import StudyRunner, refuse_other_data
from lit_recon.experiments.trainset.cell import REFUSED, RESULTS, TrainsetCellRun
from lit_recon.experiments.trainset.hypotheses import HYPOTHESES, answers, table
from lit_recon.experiments.trainset.page import write_page
from lit_recon.experiments.trainset.plots import gallery
from lit_recon.experiments.trainset.released import (
    MODEL_FILE,
    ModelTraining,
    candidates_of,
    given_weights,
    initial_weights,
    network_of,
    recorded_data,
    seen_of,
    split_hash,
    training_set,
)
from lit_recon.experiments.trainset.results import STUDY, TABLE, TrainsetStudy
from lit_recon.experiments.trainset.settings import (
    PLAIN,
    ReleasedKey,
    TrainsetCell,
    TrainsetSettings,
    build_cells,
    released_models,
    trainings,
)
from lit_recon.io.files import write_text
from lit_recon.modules.loggers import finish, log_grid, log_numbers
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.record import read_json
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.trainer import TrainerSettings

#: Settings with which a study grows: more attacks, starts, defenses or seeds, or changes that no result depends on.
_GROWS = ("attacks", "starts", "defenses", "seeds", "threads", "device")


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    purpose = "Reconstruct the training sets of released models."
    return settings_parser(program, purpose, TrainsetSettings, ClusterSettings)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Train the missing models, run the cells without results, and write the page."""
    call = Call(arguments, values, "trainset")
    settings, cluster = call.settings(TrainsetSettings), call.settings(ClusterSettings)
    cluster.check(arguments.prog)
    procedures = trainings(settings, call.own)
    checked(settings, procedures)
    models, cells = released_models(settings, call.own), build_cells(settings, call.own)
    runs = [TrainsetCellRun(settings, cell, procedures[cell.model.defense]) for cell in cells]
    pieces = [_model_piece(settings, key, procedures[key.defense]) for key in models]
    path = call.folder.path
    if not settings.overwrite:
        now = split_hash(settings)
        refuse_other_data(call.folder, {key.folder: now for key in models}, recorded_data)
    study = StudyRunner([*pieces, *(run.piece for run in runs)], path)
    study.open(call.config, settings.overwrite, (*SAME_RUN, *_GROWS))
    print(f"study       {study.progress()}, {len(models)} of them trainings")
    failed = cluster.run(study, TrainerSettings("cpu", threads=settings.threads))
    study.require([piece for piece in failed if not study.is_settled(piece)])
    description = _description(settings, study, cells)
    if not description["cells"]:
        reasons = "; ".join(dict.fromkeys(description["refused"].values()))
        raise ThreatModelError(f"no attack applies to its model: {reasons}")
    write_text(path / STUDY, json.dumps(description, indent=2))
    found = TrainsetStudy.read(path)
    write_text(path / TABLE, found.csv_text())
    if told := answers(found):
        write_text(path / HYPOTHESES, table(told))
    else:
        (path / HYPOTHESES).unlink(missing_ok=True)  # of the study before it grew
    record, loggers = found.record(), call.loggers()
    log_numbers(loggers, record)
    log_grid(loggers, "reconstructions", gallery(found, found.best), 0)
    finish(loggers)
    write_metrics(study.folder, {**record, **environment()})
    print("\n".join(found.summary()))
    print(f"report      {write_page(path)}")


def _model_piece(settings: TrainsetSettings, key: ReleasedKey, training: Training) -> Piece:
    title = f"model, seed {key.seed}" + ("" if key.defense == PLAIN else f", {key.defense}")
    return Piece(key.folder, title, ModelTraining(settings, key, training), results=(MODEL_FILE,))


#: Steps of training after which attacks are checked: their assumptions are about weights that have changed.
_STEPS_OF_CHECK = 2


def checked(settings: TrainsetSettings, procedures: Mapping[str, Training]) -> None:
    """Refuse settings that do not fit each other or the data, and attacks that do not apply, before any training.

    Attacks are checked on the model that was trained elsewhere, or on networks after a step or two of every training,
    as if it had ended as planned; those of the test for members without one image, too. An attack has to apply to one
    training only: the cells of the others say that it does not. A LitReconError names the attack and the assumption, or
    the defense with which these steps fail.
    """
    seed, test = settings.seeds.first, settings.membership
    examples, training = training_set(settings, seed), procedures[PLAIN]
    if examples.left_out:
        print(f"note        the released model was trained on {examples.left_out} images of the data: none is public")
    network = network_of(settings, examples, seed)

    def trained(defense: str, index: int | None) -> ReleasedModel:
        training, begin, data = procedures[defense], initial_weights(network), examples.trained_on(index)
        brief = replace(training, steps=max(_STEPS_OF_CHECK, training.parts), until=0.0)
        try:
            weights = brief.run(network, *data, begin, generator=torch.Generator().manual_seed(0)).weights
        except LitReconError as error:
            place = "training" if defense == PLAIN else f"defenses.{defense}"
            without = "" if index is None else ", for membership without one training image"
            raise type(error)(f"{place}{without}: {error}") from error
        return seen_of(settings, training, examples, network, weights, begin, training.until, len(data[1]))

    models: list[tuple[ReleasedModel, ReleasedModel | None]]
    if settings.released is not None:
        weights, begin, loss = given_weights(settings, network, examples)
        seen = seen_of(settings, training, examples, network, weights, begin or None, loss, examples.n_examples)
        models = [(seen, None)]
    else:  # the test for members attacks models without one image, too
        models = [(trained(name, None), None if test is None else trained(name, 0)) for name in procedures]

    def check(attack_name: str, name: str, share: float, seen: ReleasedModel, fewer: ReleasedModel | None) -> None:
        attack, start = settings.attacks[attack_name], settings.starts[name]
        place, advice = f"attacks.{attack_name}, starts.{name}", ""
        try:
            attack.check(candidates_of(settings, seen, examples, start, share, seed, 0))
            if test is not None and fewer is not None and test.covers(attack_name, name):
                place += ", without one training image"
                advice = "; or leave the attack out of membership.attacks"
                attack.check(candidates_of(settings, fewer, examples, start, share, seed, 0))
        except LitReconError as error:
            raise type(error)(f"{place}: {error}{advice}") from error

    for name, start in settings.starts.items():
        for share in start.truth_shares():
            for attack_name in settings.attacks:
                refusals = []
                for model in models:
                    try:
                        check(attack_name, name, share, *model)
                    except REFUSED as error:
                        refusals.append(error)
                if len(refusals) == len(models):
                    raise refusals[0]


def _description(settings: TrainsetSettings, study: StudyRunner, cells: Sequence[TrainsetCell]) -> dict[str, Any]:
    """Information for the page beyond the cells."""
    there = [cell for cell in cells if (study.folder.path / cell.folder / RESULTS).is_file()]
    refused = {
        cell.describe(): str(read_json(path, "delete it").get("reason"))
        for cell in cells
        if cell not in there and (path := study.folder.failure(cell.folder)).is_file()
    }
    return {
        "cells": [f"{cell.folder}/{RESULTS}" for cell in there],
        "refused": refused,
        "known": vars(settings.known),
        "truth_in_start": sorted({cell.start for cell in cells if cell.share > 0}),
        "elsewhere": settings.released is not None,
    }
