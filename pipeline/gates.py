"""Gates: cheap refusals on what ingest found, before any dear stage. Decodes nothing.

Source: DESIGN 2; spec/faults.md D2, D4, W1.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.stage import Result, Unit
from schemas.clip import Clip
from schemas.quality import Reason, Verdict, because
from schemas.timeline import GRID_RATE, WINDOW


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
    # Longest run in the pack: navigation 0.01-0.14, events up to 0.30 (the player waits), frozen clip 0.25,
    # menu 0.45. A frozen run below the gate stays in the report and in the facts.
    max_frozen_share: float = Field(
        default=0.4, gt=0, le=1, description="longest run of one picture, as a share of the clip"
    )


class Gates:
    """Stage: reasons in the order of the settings; facts are the figures they were judged by."""

    name: ClassVar[str] = "gates"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("ingest",)
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: GatesConfig) -> None:
        self.config: GatesConfig = config

    def frozen(self, clip: Clip) -> object:
        return None

    def run(self, unit: Unit, scratch: Path) -> Result:
        """No outputs. Rejects with every reason that applies."""
        c, facts = self.config, unit.receipts["ingest"].facts
        frames, seconds, fps = int(facts["frames"]), float(facts["duration_s"]), float(facts["fps"])
        bad = int(facts["bad_frames"]) + int(facts["missing_packets"])
        frozen, step = int(facts["longest_frozen"]), int(facts["picture_step"])
        share = frozen / frames
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
        if frozen > 1 and share > c.max_frozen_share:
            detail = f"one picture for {frozen} of {frames} frames, {c.max_frozen_share:.0%} is the most"
            reasons.append(because(Reason.FROZEN, detail))
        verdict = Verdict.rejected(*reasons) if reasons else Verdict.ok()
        return Result(verdict, facts={"frozen_share": round(share, 6), "effective_fps": round(fps / step, 6)})
