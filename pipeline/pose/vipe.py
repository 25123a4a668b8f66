"""The `vipe` estimator: ViPE, in its own environment, run as a program on one window at a time.

Each window of a clip is a video file of its own; the program's poses for it are checked and the windows are
joined by `stitch`. Whatever happens to one window costs that window alone and is said in its row.
Source: DESIGN 4, rule 4; spec/formats.md 1.4; docs/vipe.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.frames import frame_pass
from pipeline.media import FramesDiffer, media
from pipeline.pose import Estimated
from pipeline.pose.stitch import stitch
from pipeline.pose.vipe_output import BadOutput, Layout, MissingOutput, read_focal, read_poses
from pipeline.pose.vipe_window import WindowFiles
from pipeline.stage import Unit
from schemas.clip import FrameTable
from schemas.pose import PoseTrack, Scale
from schemas.stitch import WindowRow, WindowTrack
from schemas.timeline import OVERLAP, WINDOW, Span, windows

VIPE = "vipe-1"
OUTPUT = "out"
# What a program of another environment must not inherit: it would import this project's packages.
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
TAIL_BYTES, TAIL_CHARS = 4096, 200


class VipeConfig(BaseModel):
    """How ViPE is run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    command: tuple[str, ...] = Field(
        default=(),
        description="program that takes ViPE's settings as arguments, by absolute paths (docs/vipe.md)",
    )
    pipeline: str = Field(default="default", description="ViPE's pipeline preset")
    settings: tuple[str, ...] = Field(
        default=("pipeline.post.depth_align_model=null",),
        description="further settings in ViPE's own words; the default leaves out dense depth",
    )
    overlap: int = Field(
        default=OVERLAP,
        ge=1,
        le=WINDOW // 2,
        description="frames that neighbouring windows share; 40 holds scale over 60 s (docs/poses.md)",
    )
    timeout_s: float = Field(default=900, gt=0, description="most seconds of one window")

    def asked(self) -> VipeConfig:
        """What is asked of ViPE, without where it lies and how long it may take: a change of these makes no
        clip's poses stale."""
        return self.model_copy(update={"command": (), "timeout_s": 0.0})


class WindowFault(StrEnum):
    """Why a window has no poses; the text after the colon is free detail."""

    EXIT = "vipe_exit"
    TIMEOUT = "vipe_timeout"
    NO_OUTPUT = "vipe_no_output"
    BAD_OUTPUT = "vipe_bad_output"


@dataclass(frozen=True, slots=True)
class Fault:
    """A window without poses, and why."""

    reason: str


class Vipe:
    """Applies to every clip. A window that fails has a row with its reason and no poses; the clip goes on."""

    name = VIPE

    def __init__(self, config: VipeConfig) -> None:
        self._config = config

    def applies(self, unit: Unit) -> bool:
        return True

    def estimate(self, unit: Unit, table: FrameTable) -> Estimated:
        """Raises FileNotFoundError when the program is not on this machine (then no clip should pass as one
        without poses), and FramesDiffer when the media file does not show the frames of the table."""
        program = next(iter(self._config.command), "")
        if shutil.which(program) is None:
            raise FileNotFoundError(
                f"pose.vipe.command: {program!r} is no program on this machine; install ViPE (docs/vipe.md)"
            )
        # A clip shorter than one window, where the gates let it through, is one short window.
        plan = windows(len(table), WINDOW, self._config.overlap).spans
        spans = plan or (Span(0, len(table)),)
        answers: list[WindowTrack | Fault] = []
        with tempfile.TemporaryDirectory(prefix="wp2-vipe-") as scratch:

            def take(number: int, video: Path) -> None:
                answers.append(self._window(number, spans[number], video))

            rate = 1 / (table.duration() / len(table))
            with media(unit) as path, WindowFiles(spans, Fraction(rate), Path(scratch), take) as files:
                seen = frame_pass(path, [files])
        if not np.array_equal(seen.pixels, table.pixels):
            raise FramesDiffer("the media file shows other frames than the table; run ingest again")
        return join(spans, answers, len(table))

    def _window(self, number: int, span: Span, video: Path) -> WindowTrack | Fault:
        with tempfile.TemporaryDirectory(prefix="out-", dir=video.parent) as folder:
            fault = self._run(video, Path(folder))
            if fault is not None:
                return fault
            layout = Layout(Path(folder) / OUTPUT, video.stem)
            try:
                track = read_poses(layout, len(span), VIPE)
                return WindowTrack(number, span, track, focal=read_focal(layout, len(span)))
            except MissingOutput as error:
                return Fault(f"{WindowFault.NO_OUTPUT}: {error}")
            except BadOutput as error:
                return Fault(f"{WindowFault.BAD_OUTPUT}: {error}")

    def _run(self, video: Path, folder: Path) -> Fault | None:
        """Run the program on one video in `folder`, in a process group that is gone afterwards."""
        # Relative paths need no quoting in the settings' grammar, and no message names a scratch folder.
        arguments = (
            f"pipeline={self._config.pipeline}",
            "streams=raw_mp4_stream",
            f"streams.base_path=../{video.name}",
            "streams.frame_end=-1",
            f"pipeline.output.path={OUTPUT}",
            "pipeline.output.save_artifacts=true",
            "pipeline.output.save_viz=false",
            *self._config.settings,
        )
        with (folder / "stderr").open("wb") as stderr:  # a file: a pipe that nobody empties would block it
            process = subprocess.Popen(
                [*self._config.command, *arguments],
                cwd=folder,
                env={k: v for k, v in os.environ.items() if k not in OURS},
                stdin=subprocess.PIPE,  # ends with this process: `environments/vipe_run.py` watches it
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                status = process.wait(self._config.timeout_s)
            except subprocess.TimeoutExpired:
                return Fault(f"{WindowFault.TIMEOUT}: more than {self._config.timeout_s:g} s")
            finally:
                _end(process)
        if status == 0:
            return None
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Fault(f"{WindowFault.EXIT}: {how}: {_tail(folder / 'stderr')}")


def join(spans: Sequence[Span], answers: Sequence[WindowTrack | Fault], frames: int) -> Estimated:
    """The track of a clip from what came of its windows. Windows that failed are left out of the joins, so
    that their neighbours keep every frame of theirs; their rows stand in order with the others."""
    tracks = [a for a in answers if isinstance(a, WindowTrack)]
    failed = {i: a.reason for i, a in enumerate(answers) if isinstance(a, Fault)}
    rows = {i: _failed_row(i, spans[i], reason) for i, reason in failed.items()}
    if not tracks:
        nan = np.full((frames, 3, 3), np.nan)
        track = PoseTrack(nan, nan[:, 0], np.zeros(frames, np.bool_), Scale.UNKNOWN, VIPE)
        return Estimated(track, tuple(rows.values()))
    joined = stitch(tracks, frames)
    rows |= {row.window: row for row in joined.windows}
    return Estimated(joined.track, tuple(rows[i] for i in sorted(rows)), joined.seams)


def _failed_row(number: int, span: Span, reason: str) -> WindowRow:
    return WindowRow(
        window=number,
        start=span.start,
        stop=span.stop,
        estimator=VIPE,
        valid_share=0.0,
        world=-1,
        segment=-1,
        scale=None,
        scale_spread=None,
        scale_kept=False,
        reasons=(reason,),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process group, its leader included."""
    with contextlib.suppress(ProcessLookupError):  # the group is empty: everything ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tail(path: Path) -> str:
    """The last line of a log, in one line; progress bars are lines that end with a carriage return."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [" ".join(line.split()) for line in text.replace("\r", "\n").split("\n")]
    return next((line for line in reversed(lines) if line), "nothing on stderr")[:TAIL_CHARS]
