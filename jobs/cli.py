"""The `wp2` command. Each command is thin: it reads its arguments, calls one function and prints."""

from __future__ import annotations

import logging
import sys

from jobs.commands import captions as captions
from jobs.commands import curate as curate
from jobs.commands import evaluate as evaluate
from jobs.commands import evaluate_events as evaluate_events
from jobs.commands import evaluate_history as evaluate_history
from jobs.commands import export as export
from jobs.commands import look as look
from jobs.commands import quality as quality
from jobs.commands import record as record
from jobs.commands import rollout as rollout
from jobs.commands import settings as settings
from jobs.commands import train as train
from jobs.commands import weights as weights
from jobs.commands.base import app, complain
from schemas.errors import UserError

INTERRUPTED = 130


def main() -> None:
    """Entry point: known errors end in one line and exit code 1."""
    # torchao registers enumerations in a way that torch 2.13 complains of, whenever diffusers looks for it.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        app()
    except UserError as error:
        complain(str(error))
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # how typer answers Ctrl-C
            how = "starts anew" if _anew(sys.argv[1:]) else "goes on from here"
            complain(f"stopped; the same command {how}")
        raise
    except KeyboardInterrupt:  # while modules load
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `wp2 table ... | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        complain(f"{where}{error.strerror or error}")
        sys.exit(1)


def _anew(words: list[str]) -> bool:
    """Does a command keep nothing of a run that was stopped."""
    return words[:1] == ["rollout"] or (words[:1] == ["eval"] and words[1:2] not in (["events"], ["wbench"]))
