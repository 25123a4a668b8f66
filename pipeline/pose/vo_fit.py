"""Robust fit of rotation and direction of translation to tracked points, for many steps at once.

Step k -> k + 1 of a camera that turns by a rotation and moves by an unknown length along a unit direction t.
A point seen at bearing a would, were it infinitely far away, be seen at warp(a); being near, it lies further
along a half-line from there, away from the direction of travel. The residual is the distance from that
half-line, so depth never enters, and a solution with the scene behind the camera costs what it is worth
(recoverPose flips: 0.11-0.14 deg median error, but correlation 0.1-0.4).

Two kinds of camera, told apart by what looking up does (`Look`):
  tilt    a rotation: warp parameters are a rotation vector (pitch up, yaw right, roll) in radians;
  shear   the picture slides and the camera stays level: (slide of the horizon, yaw right, horizon), the
          horizon being the tangent of the pitch at the step's start.
All bearings are (x / z, y / z) of OpenCV axes. The unit of a residual is focal lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Look(StrEnum):
    """What the picture does when the player looks up or down."""

    TILT = "tilt"
    SHEAR = "shear"


OCCAM, NEAR = 0.05, 4.0
"""A point explained by its nearness costs 0.05 more than one that lies where an infinitely far one would,
within 4 times the noise (1 px): of two motions that explain the points alike, the one with more of a far
background is likelier. At 0.05, no step of nav10 was left more than 2 degrees off (0.75 % without); at 0.25,
5 % of nav08 were, for it then draws near walls to infinity."""


@dataclass(frozen=True)
class Points:
    """Bearings of P points in both frames of M steps. a, b: [M, P, 2], finite; known: [M, P].

    noise: residual, in focal lengths, at which a point counts half as much: [M] or one number.
    """

    a: Floats
    b: Floats
    known: Bools
    noise: float

    def take(self, rows: npt.NDArray[np.intp]) -> Points:
        return Points(self.a[rows], self.b[rows], self.known[rows], self.noise)


@dataclass(frozen=True)
class Motion:
    """Motion of M steps. warp: [M, 3], see the module; direction: [M, 3], unit vector of the camera's travel
    in axes of the frame it arrives at (level axes for shear), zero where the camera only turns."""

    warp: Floats
    direction: Floats

    def take(self, rows: npt.NDArray[np.intp]) -> Motion:
        return Motion(self.warp[rows], self.direction[rows])

    @property
    def moves(self) -> Bools:
        return np.asarray(np.any(self.direction != 0, axis=1))


@dataclass(frozen=True)
class Prior:
    """Gaussian prior on the warp parameters of M steps: mean [M, 3] and precision [M, 3] (0: none)."""

    mean: Floats
    precision: Floats

    def take(self, rows: npt.NDArray[np.intp]) -> Prior:
        return Prior(self.mean[rows], self.precision[rows])


@dataclass(frozen=True)
class Residuals:
    across: Floats  # [M, P] distance from the line, signed
    behind: Floats  # [M, P] distance along it where the point lies behind its start, else 0
    along: Floats  # [M, P] distance along it where it lies on it, else 0
    near: Floats  # [M, P] inverse depth in units of the step's length, 0 for points at infinity
    normal: Floats  # [M, P, 2] unit normal of the half-line
    at: Floats  # [M, P, 2] warp(a)
    ahead: Floats  # [M, P, 2] the same, from the horizon of level axes for shear

    @property
    def squared(self) -> Floats:
        return self.across**2 + self.behind**2


def warp(look: Look, p: Floats, a: Floats) -> tuple[Floats, Floats]:
    """(where points at infinity go, the same relative to the optical axis of level axes); [M, P, 2] each."""
    x, y = a[..., 0], a[..., 1]
    if look is Look.SHEAR:
        slide, yaw, horizon = (p[:, i, None] for i in range(3))
        c, s = np.cos(yaw), np.sin(yaw)
        depth = x * s + c
        level = (y - horizon) / depth
        across = (x * c - s) / depth
        return np.stack([across, level + horizon + slide], -1), np.stack([across, level], -1)
    r = rotation(p)  # camera-to-world of the second frame in axes of the first
    z = x * r[:, 0, 2, None] + y * r[:, 1, 2, None] + r[:, 2, 2, None]
    u = (x * r[:, 0, 0, None] + y * r[:, 1, 0, None] + r[:, 2, 0, None]) / z
    v = (x * r[:, 0, 1, None] + y * r[:, 1, 1, None] + r[:, 2, 1, None]) / z
    at = np.stack([u, v], -1)
    return at, at


def rotation(p: Floats) -> Floats:
    """Matrices [M, 3, 3] of rotation vectors [M, 3] (Rodrigues)."""
    angle = np.linalg.norm(p, axis=1)[:, None, None]
    k = np.zeros((len(p), 3, 3))
    k[:, 0, 1], k[:, 0, 2], k[:, 1, 2] = -p[:, 2], p[:, 1], -p[:, 0]
    k -= k.transpose(0, 2, 1)
    a = np.sinc(angle / np.pi)
    b = 0.5 * np.sinc(angle / (2 * np.pi)) ** 2
    return np.asarray(np.eye(3) + a * k + b * (k @ k))


def residuals(look: Look, motion: Motion, points: Points) -> Residuals:
    at, ahead = warp(look, motion.warp, points.a)
    e = points.b - at
    t = motion.direction[:, None, :]
    d = -t[..., :2] + ahead * t[..., 2:]
    length = np.sqrt((d * d).sum(-1))
    far = length < 1e-9
    length = np.where(far, 1.0, length)
    g = np.where(far[..., None], np.array([1.0, 0.0]), d / length[..., None])
    along = (e * g).sum(-1)
    normal = np.stack([g[..., 1], -g[..., 0]], -1)
    front = (along > 0) & ~far
    return Residuals(
        across=(e * normal).sum(-1),
        behind=np.where(front, 0.0, along),
        along=np.where(front, along, 0.0),
        near=np.where(front, along / length, 0.0),
        normal=normal,
        at=at,
        ahead=ahead,
    )


def cost(res: Residuals, points: Points) -> Floats:
    """Geman-McClure cost of each step, [M]: a point far off costs 1, one at `noise` a half."""
    q = res.squared / points.noise**2
    far = (res.along / (NEAR * points.noise)) ** 2
    return np.asarray(np.where(points.known, q / (1 + q) + OCCAM * far / (1 + far), 0.0).sum(1))


def prior_cost(motion: Motion, prior: Prior | None) -> Floats:
    if prior is None:
        return np.zeros(len(motion.warp))
    return np.asarray((prior.precision * (motion.warp - prior.mean) ** 2).sum(1))


def _warp_jacobian(look: Look, motion: Motion, res: Residuals, a: Floats) -> Floats:
    """d at / d warp, [M, P, 2, 3]; for tilt, of a rotation applied after the present one."""
    x, y = res.at[..., 0], res.at[..., 1]
    j = np.zeros((*x.shape, 2, 3))
    if look is Look.SHEAR:
        level = res.ahead[..., 1]
        yaw = motion.warp[:, 1, None]
        j[..., 1, 0] = 1
        j[..., 0, 1] = -1 - x * x
        j[..., 1, 1] = -level * x
        j[..., 1, 2] = 1 - 1 / (a[..., 0] * np.sin(yaw) + np.cos(yaw))
        return j
    j[..., 0, 0], j[..., 1, 0] = x * y, 1 + y * y
    j[..., 0, 1], j[..., 1, 1] = -1 - x * x, -x * y
    j[..., 0, 2], j[..., 1, 2] = y, -x
    return j


def normal_equations(
    look: Look, motion: Motion, points: Points, res: Residuals, prior: Prior | None
) -> tuple[Floats, Floats, Floats]:
    """(H [M, 5, 5], gradient [M, 5], basis [M, 3, 2]) of the robust cost in (warp, two tangents of t).

    In units of noise. Rows of a step that only turns have an identity in place of its direction.
    """
    jw = _warp_jacobian(look, motion, res, points.a)
    t = motion.direction
    basis = tangents(t)
    m, g = res.normal, np.stack([-res.normal[..., 1], res.normal[..., 0]], -1)
    stretch = 1 + res.near * t[:, None, 2]
    j1 = np.empty((*res.across.shape, 5))
    j1[..., :3] = -stretch[..., None] * (m[..., None] * jw).sum(-2)
    dt = np.stack([-m[..., 0], -m[..., 1], (m * res.ahead).sum(-1)], -1)
    j1[..., 3:] = -res.near[..., None] * (dt @ basis)
    j2 = -(g[..., None] * jw).sum(-2)
    q = res.squared / points.noise**2
    w = np.where(points.known, 1 / (1 + q) ** 2, 0.0) / points.noise**2
    h = (j1 * w[..., None]).transpose(0, 2, 1) @ j1
    far = (res.along / (NEAR * points.noise)) ** 2
    w2 = np.where(
        res.behind != 0, w, np.where(points.known, OCCAM / (NEAR * points.noise * (1 + far)) ** 2, 0.0)
    )
    h[:, :3, :3] += (j2 * w2[..., None]).transpose(0, 2, 1) @ j2
    grad = ((w * res.across)[:, None, :] @ j1)[:, 0]
    grad[:, :3] += ((w2 * (res.behind + res.along))[:, None, :] @ j2)[:, 0]
    still = ~motion.moves
    h[still, 3:, :] = 0
    h[still, :, 3:] = 0
    h[still, 3, 3] = h[still, 4, 4] = 1
    grad[still, 3:] = 0
    if prior is not None:
        i = np.arange(3)
        h[:, i, i] += prior.precision
        grad[:, :3] += prior.precision * (motion.warp - prior.mean)
    return h, grad, basis


def tangents(t: Floats) -> Floats:
    """Two unit vectors orthogonal to each t: [M, 3, 2]."""
    least = np.eye(3)[np.abs(t).argmin(axis=1)]
    u = np.cross(t, least)
    size = np.linalg.norm(u, axis=1, keepdims=True)
    u = np.where(size > 0, u / np.where(size > 0, size, 1), np.array([1.0, 0, 0]))
    return np.stack([u, np.cross(t, u)], -1)


def refine(
    look: Look, motion: Motion, points: Points, prior: Prior | None = None, rounds: int = 8
) -> tuple[Motion, Floats]:
    """Levenberg-Marquardt from `motion`; (motion, cost [M] with the prior's share)."""
    p, t = motion.warp.copy(), motion.direction.copy()
    res = residuals(look, motion, points)
    best = cost(res, points) + prior_cost(motion, prior)
    damp = np.full(len(p), 1e-3)
    eye = np.eye(5)
    for _ in range(rounds):
        now = Motion(p, t)
        h, grad, basis = normal_equations(look, now, points, res, prior)
        scale = h * eye * damp[:, None, None] + 1e-9 * eye
        step = -np.linalg.solve(h + scale, grad[..., None])[..., 0]
        trial = _moved(look, now, step, basis)
        res2 = residuals(look, trial, points)
        c = cost(res2, points) + prior_cost(trial, prior)
        better = c < best
        p = np.where(better[:, None], trial.warp, p)
        t = np.where(better[:, None], trial.direction, t)
        best = np.where(better, c, best)
        damp = np.where(better, damp / 5, damp * 10)
        res = residuals(look, Motion(p, t), points)
    return Motion(p, t), best


def _moved(look: Look, motion: Motion, step: Floats, basis: Floats) -> Motion:
    step = np.clip(step, -0.3, 0.3)
    if look is Look.SHEAR:
        warped = motion.warp + step[:, :3]
    else:
        warped = rotation_vector(rotation(motion.warp) @ rotation(step[:, :3]))
    t = motion.direction + (basis @ step[:, 3:, None])[..., 0]
    size = np.linalg.norm(t, axis=1, keepdims=True)
    return Motion(warped, np.where(motion.moves[:, None], t / np.where(size > 0, size, 1), 0.0))


def rotation_vector(r: Floats) -> Floats:
    """Rotation vectors [M, 3] of matrices [M, 3, 3], turns below 180 degrees."""
    axis = np.stack([r[:, 2, 1] - r[:, 1, 2], r[:, 0, 2] - r[:, 2, 0], r[:, 1, 0] - r[:, 0, 1]], -1) / 2
    s = np.linalg.norm(axis, axis=1)
    c = (np.trace(r, axis1=1, axis2=2) - 1) / 2
    angle = np.arctan2(s, c)
    return np.asarray(axis * np.where(s > 1e-12, angle / np.where(s > 1e-12, s, 1), 1.0)[:, None])
