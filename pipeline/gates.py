"""Gates: cheap refusals on what ingest and the recording's signals hold, before any dear stage.

Decodes nothing. A gate without its witness (a corpus whose recordings have no signals) does not speak.
Source: DESIGN 2; spec/faults.md D2, D4, W1.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.clips.signals import Signals, read_signals
from pipeline.media import MediaTable, read_table
from pipeline.stage import Fact, Result, Unit
from schemas.clip import Clip
from schemas.quality import Reason, Verdict, because
from schemas.timeline import GRID_RATE, WINDOW

STILL = 0.2
"""Mean change a frame of gray@320, in luma levels, below which nothing happens in a second. Pack: waiting
players 0.0-0.3, an open menu 0.0-0.1, walking and turning 1-22, and 0.26-0.8 where all but a tenth of the
contrast or of the bits is gone (q_lowcontrast, q_compress_crf51)."""
STATIC_S = 3.0
"""Shortest clip, in seconds, that can be static: every player stands still for a moment."""


class GatesConfig(BaseModel):
    """Thresholds of the gates."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    min_frames: int = Field(default=WINDOW, ge=1, description="fewest frames: one pose window")
    min_seconds: float = Field(default=0.0, ge=0, description="shortest clip, in seconds")
    max_bad_frames: int = Field(
        default=0, ge=0, description="most frames, shown or cut off, that the decoder could not trust"
    )
    min_fps: float = Field(
        default=float(GRID_RATE),
        gt=0,
        description="lowest rate of new pictures: below 16 a second, entries of the 16 fps grid would repeat",
    )
    max_cuts: int = Field(default=0, ge=0, description="most hard cuts inside the clip")
    max_menu_share: float = Field(
        default=0.1, ge=0, le=1, description="most frames, as a share, in which a menu is open"
    )
    max_covered: float = Field(
        default=0.5, gt=0, le=1, description="most of the picture that overlays cover, mean over the clip"
    )
    # Longest run in the pack: navigation 0.01-0.14, events up to 0.30 (the player waits), frozen clip 0.25,
    # menu 0.45. A frozen run below the gate stays in the report, in the facts and in the table of quality.
    max_frozen_share: float = Field(
        default=0.4, gt=0, le=1, description="longest run of one picture, as a share of the clip"
    )
    # Pack: navigation 0.00-0.13 of the seconds, events up to 0.50 (the player waits), menu 0.90.
    max_static_share: float = Field(
        default=0.75, gt=0, le=1, description="most seconds, as a share, in which next to nothing changes"
    )


class Gates:
    """Stage: reasons in the order of the settings, what a clip is before what it looks like (an open menu is
    also frozen); facts are the figures they were judged by."""

    name: ClassVar[str] = "gates"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("ingest",)
    reads: ClassVar[tuple[str, ...]] = ("signals",)

    def __init__(self, config: GatesConfig) -> None:
        self.config: GatesConfig = config

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        """No outputs. Rejects with every reason that applies. Raises StoreError where the frame table or the
        signals of the recording cannot be read."""
        c, facts = self.config, unit.receipts["ingest"].facts
        frames, seconds, fps = int(facts["frames"]), float(facts["duration_s"]), float(facts["fps"])
        bad = int(facts["bad_frames"]) + int(facts["missing_packets"])
        frozen, step = int(facts["longest_frozen"]), int(facts["picture_step"])
        share = frozen / frames
        static = static_share(read_table(unit))
        reasons = []
        if frames < c.min_frames or seconds < c.min_seconds:
            wanted = f"{c.min_frames} frames and {c.min_seconds:g} s are the least"
            reasons.append(because(Reason.TOO_SHORT, f"{frames} frames, {seconds:.2f} s; {wanted}"))
        if bad > c.max_bad_frames:
            hit = f"{facts['windows_damaged']} of {facts['windows']} windows"
            reasons.append(because(Reason.DECODE_DAMAGE, f"{bad} bad frames, {hit} touched"))
        if fps / step < c.min_fps:
            shown = f"{fps:.3f} fps, every picture shown {step} times" if step > 1 else f"{fps:.3f} fps"
            reasons.append(because(Reason.BELOW_GRID_RATE, f"{shown}; {c.min_fps:g} is the least"))
        judged: dict[str, Fact] = {
            "frozen_share": round(share, 6),
            "effective_fps": round(fps / step, 6),
            "static_share": round(static, 6),
        }
        if unit.clip.signals is not None:
            against, seen = self._signals(read_signals(unit.corpus, unit.clip))
            reasons += against
            judged |= seen
        if frozen > 1 and share > c.max_frozen_share:
            detail = f"one picture for {frozen} of {frames} frames, {c.max_frozen_share:.0%} is the most"
            reasons.append(because(Reason.FROZEN, detail))
        if static > c.max_static_share and seconds >= STATIC_S:
            detail = f"nothing changes in {static:.0%} of the seconds, {c.max_static_share:.0%} is the most"
            reasons.append(because(Reason.STATIC, detail))
        return Result(Verdict.rejected(*reasons) if reasons else Verdict.ok(), facts=judged)

    def _signals(self, signals: Signals) -> tuple[list[str], dict[str, Fact]]:
        """Reasons and facts from what the cutting stage saw of the clip's source frames."""
        c, reasons = self.config, []
        cuts = np.flatnonzero(signals.cut[1:]) + 1  # a cut before frame 0 is where the clip begins
        menu, covered = float(signals.menu.mean()), float(signals.covered.mean())
        if len(cuts) > c.max_cuts:
            where = ", ".join(str(k) for k in cuts[:5]) + (", ..." if len(cuts) > 5 else "")
            reasons.append(because(Reason.CUT_INSIDE, f"{len(cuts)} hard cuts, before frames {where}"))
        if menu > c.max_menu_share:
            detail = f"a menu is open in {menu:.0%} of the frames, {c.max_menu_share:.0%} is the most"
            reasons.append(because(Reason.MENU, detail))
        if covered > c.max_covered:
            detail = f"overlays cover {covered:.0%} of the picture, {c.max_covered:.0%} is the most"
            reasons.append(because(Reason.COVERED, detail))
        facts: dict[str, Fact] = {
            "cuts": len(cuts),
            "menu_share": round(menu, 6),
            "covered": round(covered, 6),
        }
        return reasons, facts


def static_share(table: MediaTable) -> float:
    """Share of a clip's seconds in which the mean change is under STILL; 0 for a clip of one frame. The last
    second may be short."""
    if len(table.frames) < 2:
        return 0.0
    second = table.frames.seconds[1:].astype(np.int64)  # frame 0 has no frame before it to change from
    _, which = np.unique(second, return_inverse=True)
    mean = np.bincount(which, table.change[1:].astype(np.float64)) / np.bincount(which)
    return float((mean < STILL).mean())
