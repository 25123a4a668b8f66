"""How far the camera turned over each latent: what the log says, what the poses say, and which one counts.

Which witness wins, and why. Poses given by the engine are exact: they win. Else a calibrated log wins where
the camera agrees with it: it has the error of its rate (under 1 %) and no noise, is exactly zero when nothing
is pressed and does not drop out in the dark, where odometry has 0.1-0.3 degrees of noise a latent and some
flipped steps. Where the camera answers to something that the log does not hold, the log says nothing and the
poses count; without poses such a latent is unknown.
Source: DESIGN 2, rule 4; spec/worldplay2.md a.6; spec/faults.md C5, C7, P8. Measured in docs/rotation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.inputs import Inputs
from pipeline.pose.given import Given
from pipeline.pose.stage import turns
from pipeline.rotation_inputs import drive, turned_by_keys
from pipeline.rotation_masks import STILL_DEG
from pipeline.sources.keymap import Action, InputUnit
from schemas.action import InputRate, runs
from schemas.clip import FrameTable
from schemas.pose import PoseTrack, turn_between
from schemas.quality import Unknown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DISAGREE_SHARE = 0.25
"""Share of the logged turn by which a step may differ before it contradicts the log: `vo` is off by less in
95 % of the steps of the navigation clips."""
CONTRADICT_STEPS = 8
"""Steps in a row that must differ before a log that calls itself complete is not believed: a quarter of a
second. Menus and cutscenes last longer; failures of odometry in a row seldom do."""


@dataclass(frozen=True)
class Turns:
    """One axis over the T - 1 latents after the first: degrees, NaN with a reason where not known."""

    degrees: Floats
    reasons: list[str]

    @property
    def known(self) -> Bools:
        return np.isfinite(self.degrees)


@dataclass(frozen=True)
class Chosen:
    """turns: what counts. from_log: bool [T-1]. log, poses: the witnesses. contradicted: bool [T-1], the
    camera did something else than the log says."""

    turns: Turns
    from_log: Bools
    log: Turns
    poses: Turns
    contradicted: Bools


def choose(
    inputs: Inputs | None,
    action: Action,
    table: FrameTable,
    ends: Ints,
    track: PoseTrack,
    rates: Mapping[str, InputRate],
) -> Chosen:
    """Turn of one axis over each latent. ends: int64 [T], frame at each latent's end. rates: by input."""
    axis = (Action.YAW, Action.PITCH).index(action)
    steps, reason = _logged(inputs, action, table, rates)
    log = _sum_log(steps, reason, ends)
    poses = _from_poses(track, ends, axis)
    seen = turns(track)[:, axis]
    complete = inputs is not None and (inputs.part.complete or action in inputs.part.absent)
    strange = _strange(steps, seen, CONTRADICT_STEPS if complete else 1)
    contradicted = np.array([strange[a:b].any() for a, b in pairwise(ends)], bool)
    usable = log.known & ~contradicted
    if not complete:  # only a camera that was seen to follow the log confirms it
        usable &= np.array([np.isfinite(seen[a:b]).all() for a, b in pairwise(ends)], bool)
    from_log = usable & ~poses.known if track.estimator == Given.name else usable
    degrees = np.where(from_log, log.degrees, poses.degrees)
    # What the log knows and is not used for, something else than the log may have turned.
    posed = bool(track.valid.any())
    hidden = [not (complete or posed) and r == Unknown.UNCALIBRATED for r in log.reasons]
    unlogged = log.known | np.array(hidden, bool)
    others = poses.reasons if posed else log.reasons
    missing = [
        "" if np.isfinite(d) else str(Unknown.INPUT_NOT_LOGGED) if u else r
        for d, u, r in zip(degrees, unlogged, others, strict=True)
    ]
    return Chosen(Turns(degrees, missing), from_log, log, poses, contradicted)


def _logged(
    inputs: Inputs | None, action: Action, table: FrameTable, rates: Mapping[str, InputRate]
) -> tuple[Floats, npt.NDArray[np.object_]]:
    """(degrees, reason where unknown) of each native step, by the log alone.

    An axis of which no input has a rate is unknown throughout: that nothing was pressed is then no witness
    that nothing turned.
    """
    f = len(table)
    nothing = np.full(f, np.nan)
    if inputs is None:
        return nothing, np.full(f, Unknown.NO_POSES, object)
    driving = inputs.part.driving(action)
    if action in inputs.part.absent:
        return np.zeros(f), np.full(f, "", object)
    if not driving:
        return nothing, np.full(f, Unknown.NOT_MAPPED, object)
    known = {name for name, rate in rates.items() if rate.value is not None}
    if not any(name.split("+")[0] == i.column for i in driving for name in known):
        return nothing, np.full(f, Unknown.UNCALIBRATED, object)
    driven = drive(inputs, action, table.seconds)
    lasts = np.diff(table.pts, append=2 * table.pts[-1] - table.pts[-2]) * float(table.time_base)
    degrees = turned_by_keys(driven, lasts, rates)
    for i in driving:
        if i.unit is InputUnit.COUNT:
            counts, rate = driven.counts[i.column], rates.get(i.column)
            per_count = np.nan if rate is None or rate.value is None else rate.value
            degrees = degrees + np.where(counts == 0, 0.0, counts * per_count)
    reason = np.where(np.isfinite(degrees), "", np.where(driven.gap, Unknown.LOG_GAP, Unknown.UNCALIBRATED))
    return degrees, reason.astype(object)


def _sum_log(steps: Floats, reason: npt.NDArray[np.object_], ends: Ints) -> Turns:
    degrees = np.array([steps[a:b].sum() for a, b in pairwise(ends)])
    reasons = [next((str(r) for r in reason[a:b] if r), "") for a, b in pairwise(ends)]
    return Turns(degrees, reasons)


def _from_poses(track: PoseTrack, ends: Ints, axis: int) -> Turns:
    """Turn between the poses of consecutive latent ends. More than half a round is told from the short way by
    the sum of the steps between."""
    out = turn_between(track, ends[:-1], ends[1:])
    if axis == 0:
        steps = turns(track)[:, 0]
        summed = np.array([steps[a:b].sum() for a, b in pairwise(ends)])
        rounds = np.rint((summed - out[:, 0]) / 360.0)
        out[:, 0] += 360.0 * np.where(np.isfinite(rounds), rounds, 0.0)
    known: Bools = np.asarray(np.isfinite(out).all(axis=1))
    degrees = np.where(known, out[:, axis], np.nan)
    return Turns(degrees, ["" if k else str(Unknown.POSE_GAP) for k in known])


def _strange(logged: Floats, seen: Floats, least: int) -> Bools:
    """Steps in which the camera does not do what the log says, `least` or more in a row."""
    differs: Bools = np.asarray(np.abs(seen - logged) > STILL_DEG + DISAGREE_SHARE * np.abs(logged))
    out = np.zeros(len(seen), bool)
    for start, stop in runs(differs):
        out[start:stop] = stop - start >= least
    return out


def agreement(chosen: Chosen, name: str) -> dict[str, float | int]:
    """Facts on how the two witnesses of an axis agree, over the latents that both know."""
    both = chosen.log.known & chosen.poses.known
    log, poses = chosen.log.degrees[both], chosen.poses.degrees[both]
    moving = len(log) > 1 and log.std() > 0 and poses.std() > 0
    return {
        f"{name}_latents_from_log": int(chosen.from_log.sum()),
        f"{name}_latents_compared": int(both.sum()),
        f"{name}_latents_contradicted": int((chosen.contradicted & chosen.log.known).sum()),
        f"{name}_log_pose_correlation": round(float(np.corrcoef(log, poses)[0, 1]), 4) if moving else 0.0,
        f"{name}_log_pose_median_deg": round(float(np.median(np.abs(log - poses))), 4) if len(log) else 0.0,
    }
