"""The commands."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gradsieve import __version__
from gradsieve.checks import UsageError
from gradsieve.cli.bench import bench
from gradsieve.cli.compare import compare
from gradsieve.cli.demo import demo
from gradsieve.cli.display import INTERRUPTED
from gradsieve.cli.lab import lab
from gradsieve.cli.options import takes_train_options
from gradsieve.cli.plan import plan
from gradsieve.cli.report import report
from gradsieve.cli.train import train
from gradsieve.training.grid import AXES
from gradsieve.training.place import find_place

USAGE = 2
SILENT_SECONDS = 3.0

app = typer.Typer(
    name="gradsieve",
    help="Data-parallel training that sends only the gradients that matter.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(takes_train_options(train))
app.command()(takes_train_options(compare, several=AXES))
app.command()(report)
app.add_typer(bench)
app.command()(lab)
app.command()(plan)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"gradsieve {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; what the user can mend ends with one line and exit code 2."""
    # a user's own task lies beside them, not beside the script
    sys.path.insert(0, str(Path.cwd()))
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=arguments or ["--help"], standalone_mode=False)
    except UsageError as error:
        _complain(str(error))
        sys.exit(USAGE)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own errors have it, in all its versions
            raise
        _complain(error.format_message())
        sys.exit(USAGE)
    sys.exit(code or 0)


def _complain(text: str) -> None:
    """One line, once a machine."""
    try:
        place = find_place(os.environ)
    except UsageError:
        place = None
    if place is None or place.local_rank == 0:
        typer.echo(f"gradsieve: {' '.join(text.split())}", err=True)
    else:
        # a launcher ends the others at the first one's end, and that is not to be before the line is out
        time.sleep(SILENT_SECONDS)
