"""Height of the horizon along a clip whose picture slides when the player looks up or down.

A turn shows where the horizon is (points off it rise or sink towards the sides); between turns the slide of
each step carries it on. A forward and a backward pass join both. Measured on the navigation clips: median
error 0.005-0.009 of a focal length (0.3-0.5 degrees), against 0.01-0.018 from each step alone.
"""

from __future__ import annotations

import numpy as np

from pipeline.pose.vo_fit import Bools, Floats

SPREAD = 0.3
"""Standard deviation of the horizon before anything is seen, in focal lengths: pitch within about 17 deg."""
FORGET = 0.999
"""Pull towards the middle, per step: a clip that shows no turn for 30 s is back at what it knew at first."""
SLIDE_NOISE = 0.003
JUMP = 0.02
"""Noise of one slide (1 px at 640 wide), and of a step whose slide is not known."""
OFFSET = 0.01
"""What no turn can show better: walls that are near, and sprites, move a single step's horizon so much."""
OUTLIER = 3.0


def smooth(slide: Floats, horizon: Floats, information: Floats, good: Bools) -> tuple[Floats, Floats]:
    """(horizon at the start of each step, its standard deviation), float64 [S] each.

    slide, horizon: of each step [S]; information: inverse variance of each horizon; good: steps to be used.
    """
    n = len(slide)
    mean, var = np.zeros(n + 1), np.zeros(n + 1)
    mean_before, var_before = np.zeros(n + 1), np.zeros(n + 1)
    x, p = 0.0, SPREAD**2
    for k in range(n + 1):
        mean_before[k], var_before[k] = x, p
        if k < n and good[k] and information[k] > 1 / SPREAD**2:
            r = 1 / information[k] + OFFSET**2
            surprise = (horizon[k] - x) ** 2 / (p + r)
            r *= max(1.0, surprise / OUTLIER**2) ** 1.5
            gain = p / (p + r)
            x, p = x + gain * (horizon[k] - x), (1 - gain) * p
        mean[k], var[k] = x, p
        if k < n:
            x = FORGET * (x + (slide[k] if good[k] else 0.0))
            p = min(SPREAD**2, p + (SLIDE_NOISE if good[k] else JUMP) ** 2)
    for k in range(n - 1, -1, -1):
        gain = min(1.0, FORGET * var[k] / var_before[k + 1])
        mean[k] += gain * (mean[k + 1] - mean_before[k + 1])
        var[k] += gain**2 * (var[k + 1] - var_before[k + 1])
    return mean[:n], np.sqrt(np.maximum(var[:n], 1e-8))
