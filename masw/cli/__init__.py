"""The `masw` command: errors become one line and an exit code (0 fine, 2 bad usage or input, 3 run failed, 130 interrupted)."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import typer
import typer.core

from masw.cli import app as dashboard
from masw.cli import bench, doctor, evaluate, models, report, run, train, train_eagle
from masw.errors import Cancelled, MaswError, plain_words


class Commands(typer.core.TyperGroup):
    """Ctrl-C as an error in words: typer itself would end the process with code 130 and no line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Cancelled(interrupted()) from None


def interrupted() -> str:
    """The line for an interrupt that no command answered itself."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return f"{f'{command}: ' if command else ''}interrupted; files that were written are whole, nothing was lost"


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding for long documents: a strong draft with a compact KV memory, the target's own output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(name="run")(run.run)
app.command(name="train")(train.train)
app.command(name="train-eagle")(train_eagle.train_eagle)
app.command(name="eval-adaptor")(evaluate.eval_adaptor)
app.command(name="bench")(bench.bench)
app.command(name="app")(dashboard.app)
app.command(name="doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(report.app, name="report")


def _version(wanted: bool) -> None:
    if wanted:
        import masw

        typer.echo(f"masw {masw.__version__}")
        raise typer.Exit


@app.callback()
def common(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point. MASW_DEBUG=1 shows tracebacks."""
    # Our own lines are the only ones on the terminal: libraries' notes about their internals help nobody here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    debug = os.environ.get("MASW_DEBUG") == "1"
    try:
        app()
    except MaswError as error:
        if debug:
            raise
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        fail(interrupted(), 130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say, and nothing to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(3)
    except Exception as error:
        if debug:
            raise
        reason = plain_words(error)
        fail(reason if reason.startswith("out of memory") else f"{reason} (set MASW_DEBUG=1 for the traceback)", 3)


def fail(message: str, code: int) -> None:
    typer.echo(f"masw: {' '.join(message.split())}", err=True)
    sys.exit(code)
