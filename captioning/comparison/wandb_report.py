"""The comparison of runs as a W&B report. Building its specification needs no login, saving it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from captioning.comparison.colors import run_colors
from captioning.comparison.markdown import markdown
from captioning.comparison.result import Comparison
from captioning.comparison.runs import Run
from captioning.errors import InputError

try:
    import wandb
    import wandb_workspaces.reports.v2 as wr
except ImportError as error:
    raise InputError("a W&B report needs wandb-workspaces: pip install -e '.[reports]'") from error

PAGE_KEY = "comparison"  # under which the page is logged


def publish(runs: Sequence[Run], comparison: Comparison, page: Path) -> str:
    """Log the page to wandb, save the report beside it and return the report's address.

    Raises:
        InputError: No run was logged to wandb, or W&B refuses the report.
    """
    places = {run.name: run.wandb for run in runs if run.wandb}
    if not places:
        raise InputError("--report: none of the runs was logged to wandb; train with its logger, see configs/")
    project = next(iter(places.values())).project
    try:
        mine = wandb.Api().default_entity or ""
        title = " · ".join(comparison.runs)
        with wandb.init(entity=mine or None, project=project, job_type="comparison", name=title, mode="online") as run:
            run.log({PAGE_KEY: wandb.Html(page.read_text(encoding="utf-8"))})
            logged = Address(run.entity or "", run.project, run.id)
        addresses = {name: Address(place.entity or mine, place.project, place.run_id) for name, place in places.items()}
        report = build_report(comparison, addresses, logged)
        report.save()
    except (wandb.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--report: W&B did not take it ({reason}); is `wandb login` done?") from error
    return str(report.url)


class Address(NamedTuple):
    """The address of a run online."""

    entity: str
    project: str
    run_id: str


def build_report(comparison: Comparison, addresses: Mapping[str, Address], page: Address) -> Any:
    """Return the report's specification, in the project of the page.

    Args:
        comparison: The comparison.
        addresses: By name, the addresses of the runs that are online; only these have curves.
        page: The address of the run that logged the comparison's page under ``PAGE_KEY``.
    """
    blocks: list[Any] = [wr.P(line) for line in [*comparison.verdicts.values(), *comparison.notices]]
    for table in [*comparison.tables, comparison.settings]:
        if table.rows:
            blocks += [wr.H2(table.title), wr.MarkdownBlock(markdown(table, comparison.columns(table)))]
    colors_of = run_colors(comparison.variants)
    colors = {address.run_id: colors_of[name].light for name, address in addresses.items()}
    curves = wr.PanelGrid(
        runsets=[_runset(group, colors) for group in _by_project(addresses.values())],
        panels=[wr.LinePlot(title=key, x="trainer/global_step", y=[key]) for key in comparison.curves],
    )
    explorer = wr.PanelGrid(
        runsets=[_runset([page], {})],
        panels=[wr.MediaBrowser(media_keys=[PAGE_KEY], num_columns=1, layout=wr.Layout(w=24, h=24))],
    )
    return wr.Report(
        entity=page.entity,
        project=page.project,
        title=f"Comparison: {', '.join(comparison.runs)}"[:128],
        blocks=[*blocks, wr.H2("Curves"), curves, wr.H2("Attention"), explorer],
        width="fluid",
    )


def _by_project(addresses: Any) -> list[list[Address]]:
    groups: dict[tuple[str, str], list[Address]] = {}
    for address in addresses:
        groups.setdefault((address.entity, address.project), []).append(address)
    return list(groups.values())


def _runset(addresses: Sequence[Address], colors: Mapping[str, str]) -> Any:
    """Return the runs at addresses in one project."""
    ids = [address.run_id for address in addresses]
    return wr.Runset(
        entity=addresses[0].entity,
        project=addresses[0].project,
        filters=f"Metric('ID') in {ids!r}",
        run_settings={run_id: wr.RunSettings(color=colors[run_id]) for run_id in ids if run_id in colors},
    )
