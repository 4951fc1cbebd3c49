"""`reconn.py rero`: bounds on reconstruction under differential privacy, and attacks compared with them."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from lit_recon.attacks.released.base import Background, ShadowSizes
from lit_recon.errors import ConfigError, LitReconError
from lit_recon.experiments.call import Call
from lit_recon.experiments.configuration import settings_parser
from lit_recon.experiments.engine.cluster import ClusterSettings
from lit_recon.experiments.engine.runner import StudyRunner, refuse_other_data
from lit_recon.experiments.released_attack.settings import ShadowSettings
from lit_recon.experiments.rero.bounds import sampled_noise
from lit_recon.experiments.rero.page import judged, write_page
from lit_recon.experiments.rero.score import CellEvaluator, measures, study_metrics, write_record
from lit_recon.experiments.rero.settings import ReroSettings, rero_cells
from lit_recon.modules.loggers import finish, log_numbers
from lit_recon.reporting.provenance import environment
from lit_recon.reporting.run_folder import RunFolder
from lit_recon.reporting.stopwatch import Stopwatch
from lit_recon.reporting.writing import write_metrics
from lit_recon.training.trainer import build_trainer, configure_process


def parser(program: str) -> ArgumentParser:
    """The command's settings."""
    purpose = "Bounds on reconstruction under differential privacy, and attacks beside them."
    return settings_parser(program, purpose, ReroSettings, ShadowSettings, ClusterSettings)


def execute(arguments: ArgumentParser, values: Namespace) -> None:
    """Validate the settings, run the cells without results, and write the page."""
    call = Call(arguments, values, "rero")
    settings, shadows = call.settings(ReroSettings), call.settings(ShadowSettings)
    cluster, folder = call.settings(ClusterSettings), call.folder
    configure_process(shadows.trainer)
    settings.check_shadows(shadows)
    cluster.check(arguments.prog, shadows.trainer)
    trainer = build_trainer(shadows.trainer, loggers=[], float64=True)
    split, cells = shadows.drawn(), rero_cells(settings.budget, call.own)
    planned = [cell.shadows() for cell in cells]
    for cell, each in zip(cells, planned, strict=True):
        try:
            plan = each.plan(split)
            settings.reconstructor.bind(Background(plan, sizes=ShadowSizes.of(plan, len(split.shadow))))
        except LitReconError as error:
            raise ConfigError(f"{cell.title}: {error}") from error
    # refuse now, not once all cells have run
    assert len(split.unseen)
    if settings.sampled is not None:
        sampled_noise(settings.sampled, settings.budget, shadows.descent.steps)
    if not settings.overwrite:
        refuse_other_data(folder, {cell.folder: split.hash for cell in cells})
    study = StudyRunner([cell.piece for cell in cells], folder.path)
    grows = ("budget.epsilons", "budget.without", "prior", "sampled", "test_images", "cache", "shard_size")
    study.open(call.config, settings.overwrite, grows)
    print(f"study       {study.progress()}; {shadows.split.shadow} shadow models in each")
    with Stopwatch(folder) as watch:
        study.require(cluster.run(study, shadows.trainer))
        judge = CellEvaluator(settings, shadows, split, folder)
        for caveat in sorted({prior.baseline.caveat for prior in judge.priors} - {""}):
            print(f"caveat      {caveat}")
        record = judge.record(
            [
                judge.measure(cell, plan, RunFolder(folder.path / cell.folder), trainer)
                for cell, plan in zip(cells, planned, strict=True)
            ]
        )
        write_record(folder, record)
        metrics = study_metrics(record)
        loggers = call.loggers()
        log_numbers(loggers, metrics)
        finish(loggers)
        facts = shadows.facts(split)
        facts |= {"seconds": watch.seconds, **environment()}
        write_metrics(folder, {**metrics, **facts}, measures(record))
        write_page(folder.path)
        print(f"bounds      {judged(record)}")
        print(f"report      {folder.report}")
