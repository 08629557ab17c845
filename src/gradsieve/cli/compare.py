"""`gradsieve compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from gradsieve.checks import UsageError
from gradsieve.cli.options import CONFIG_HELP, merged, read_config, split
from gradsieve.cli.running import run_and_show
from gradsieve.cli.study import Asked, list_study, run_study
from gradsieve.training.grid import expand, make_grid
from gradsieve.training.runner import refuse_launcher


def compare(
    given: dict[str, Any],
    study: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A study: a file with grids of runs, such as those in studies/.", metavar="STUDY"),
    ] = None,
    config: Annotated[Optional[Path], typer.Option("--config", help=CONFIG_HELP)] = None,  # noqa: UP045
    short: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--short/--full", help="Form of the study: its few epochs, or all of them. Default: --short."),
    ] = None,
    seeds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seeds", help="So many seeds, from 0 on.", min=1),
    ] = None,
    only: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--only", help="These grids of the study, separated by commas.", metavar="GRID,..."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Say what the study would run, and what is done.")] = False,
    results: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--results", help="Folder of the study's digests. Default: results/ beside the study."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time.", min=1)] = 1,
) -> int:
    """Run a grid of methods, densities, numbers of workers and seeds over one task, or a study, and sum it up.

    Takes the options of train; --method, --density, --workers or --virtual, and --seed take several values. Started
    again, it goes on where it stopped: finished runs are not repeated, failed ones are tried again.
    """
    refuse_launcher("compare starts its workers itself and is one process")
    if seeds is not None:
        if "seed" in given:
            raise UsageError("--seed and --seeds exclude one another: these seeds, or so many from 0 on")
        given["seed"] = list(range(seeds))
    output = Path(given["output"]) if "output" in given else None
    if study is not None:
        if config is not None:
            raise UsageError(f"a study holds its options itself: leave out --config {config}, or {study}")
        options = {name: value for name, value in given.items() if name != "output"}
        form, grids = "full" if short is False else "short", split(only or "")
        asked = Asked(study, form, options, grids, output, results, jobs)  # type: ignore[arg-type]
        return list_study(asked) if show else run_study(asked)
    _refuse_without_study({"--short/--full": short, "--only": only, "--list": show or None, "--results": results})
    values = merged(read_config(config), given)
    output = values.pop("output", None)
    configs = expand(values, "the command line" if config is None else str(config))
    return run_and_show(make_grid(configs, None if output is None else Path(output)), jobs)


def _refuse_without_study(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} is for a study: give its file, as in gradsieve compare studies/frontier.toml")
