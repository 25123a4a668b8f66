"""A sample is one clip: the members of its tars, the annotation record, and its row in the index.

Tars by family, with the same sample ids in the same order in each:
  media         <id>.mp4
  annotations   <id>.json  <id>.actions.npy  <id>.grid.npy  <id>.poses.npy
  latents       <id>.latents.json  <id>.hr.npy  <id>.lr.npy  ...     where a codec is configured
  text          <id>.text.json  <id>.text.npy                        where a text encoder is configured
A sample's members lie together, so one range read of a tar brings a whole sample of a family.
Source: DESIGN 2; spec/faults.md S1, S2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from schemas import SCHEMA_VERSION
from schemas.action import AXES, Reasons
from schemas.caption import StructuredCaption
from schemas.clip import ClipKind, Perspective
from schemas.policy import PENDING
from schemas.pose import Scale

FAMILIES: dict[str, tuple[str, ...]] = {
    "media": ("mp4",),
    "annotations": ("json", "actions.npy", "grid.npy", "poses.npy"),
    "latents": (
        "latents.json",
        "hr.npy",
        "lr.npy",
        "hr_y.npy",
        "lr_y.npy",
        "segments.npy",
        "segments_y.npy",
        "segments_at.npy",
    ),
    "text": ("text.json", "text.npy"),
}
"""Member suffixes of each family, in tar order. Every sample has every member of a family that is there;
`schemas.latents` describes those of the last two."""

OPTIONAL = ("latents", "text")
"""Families that a partition may be without: their places in its index are then null, in every row."""

ARRAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "actions.npy": ("float32", ("T", "6")),  # schemas.action.AXES; NaN where unknown
    "grid.npy": ("int32", ("G",)),  # frame of the media file shown at each entry of the 16 fps grid
    "poses.npy": ("float32", ("F", "3", "4")),  # camera-to-world, OpenCV axes; NaN where unknown
}
"""dtype and shape of each array of the annotations: T latents, G = 4T - 3 grid entries, F frames of the media
file."""


class ActionUnknown(BaseModel):
    """Why entries of actions.npy are NaN, by axis: runs of latents "start-stop reason", half-open, separated
    by ", "; empty where every value is known. Text, because a reader that infers types takes an empty list
    for a list of nulls."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    pitch: str = ""
    yaw: str = ""
    forward: str = ""
    lateral: str = ""
    perspective: str = ""
    jump: str = ""

    @staticmethod
    def of(reasons: Reasons) -> ActionUnknown:
        named = {a: ", ".join(f"{start}-{stop} {why}" for start, stop, why in r) for a, r in reasons.items()}
        return ActionUnknown(**named)

    def reasons(self) -> Reasons:
        """By axis, runs (first latent, last latent + 1, reason). Raises ValueError on text that is none."""
        out = {}
        for axis in AXES:
            parts = [run.split(" ", 1) for run in getattr(self, axis).split(", ") if run]
            spans = [(*part[0].split("-", 1), part[1]) for part in parts]
            out[axis] = tuple((int(start), int(stop), why) for start, stop, why in spans)
        return {axis: runs for axis, runs in out.items() if runs}

    def known(self, latents: int) -> int:
        """Leading latents, of T, whose six values are all known: how much of a clip training can use."""
        return min([latents, *(start for runs in self.reasons().values() for start, _, _ in runs)])


class Annotation(BaseModel):
    """The JSON member. Every key is always there, with one type, never null and never an empty list: a
    Hugging Face `datasets` reader infers types from the first rows and fails on other ones later."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA_VERSION
    sample_id: str
    clip_id: str
    recording_id: str
    kind: ClipKind
    split: str
    game: str
    perspective: Perspective
    licence: str
    frames: int = Field(description="F, frames of the media file")
    fps: float = Field(description="rate of the media file; its exact value is fps_num / fps_den")
    fps_num: int
    fps_den: int
    width: int
    height: int
    duration_s: float
    latent_frames: int = Field(description="T, action rows, and latents of the continuous stream")
    actions_known: int = Field(description="leading latents whose six action values are all known")
    grid_jitter_max_s: float = Field(description="largest distance of a chosen frame from its grid time")
    pose_scale: Scale = Field(description="unit of the translations in poses.npy")
    pose_estimator: str = Field(description="what made the poses; none when there are none")
    pose_valid_share: float
    action_witness: str = Field(description="what pitch and yaw come from: poses, log, both or none")
    action_unknown: ActionUnknown = Field(description="exactly the NaN entries of actions.npy, and why")
    action_lag_frames: float = Field(description="log against poses: best lag; 0 when not measured")
    caption: StructuredCaption = Field(description="one event per 5 s interval, also where nothing happens")

    @field_validator("caption")
    @classmethod
    def _has_intervals(cls, value: StructuredCaption) -> StructuredCaption:
        if not value.events:
            raise ValueError("a caption needs an event per interval; a clip has at least one interval")
        return value

    @model_validator(mode="after")
    def _known_as_explained(self) -> Annotation:
        known = self.action_unknown.known(self.latent_frames)
        if self.actions_known != known:
            raise ValueError(f"actions_known is {self.actions_known}, action_unknown leaves {known}")
        return self


MEMBER = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("xxh64", pa.uint64(), nullable=False),
    ]
)
"""A member's data bytes in its tar and their checksum (the cheap one, for the hot path)."""

PLACE = pa.struct(
    [
        pa.field("tar", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("members", pa.list_(pa.field("item", MEMBER, nullable=False)), nullable=False),
    ]
)
"""Where a sample lies in a family: the range that covers its members, headers included, and each of them."""


UNSELECTED = {"tier": PENDING, "tier_reasons": ""}
"""Columns of the index that selection fills in, and what they hold until then: the tier of a policy, and why
not a better one, in order, separated by |. The trainer's plan filters by the tier."""


def index_schema() -> pa.Schema:
    """Row of the index: one sample, its facts, and its place in each family, null where there is none."""
    facts = [
        ("sample_id", pa.string()),
        ("clip_id", pa.string()),
        ("recording_id", pa.string()),
        ("kind", pa.string()),
        ("split", pa.string()),
        ("game", pa.string()),
        ("perspective", pa.string()),
        ("licence", pa.string()),
        ("frames", pa.int64()),
        ("fps", pa.float64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("duration_s", pa.float64()),
        ("latent_frames", pa.int32()),
        ("actions_known", pa.int32()),
    ]
    fields = [pa.field(n, t, nullable=False) for n, t in facts]
    fields += [pa.field(name, pa.string(), nullable=False) for name in UNSELECTED]
    fields += [pa.field(family, PLACE, nullable=family in OPTIONAL) for family in FAMILIES]
    return pa.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION)})


def check_array(
    name: str,
    array: np.ndarray,
    sizes: Mapping[str, int],
    arrays: Mapping[str, tuple[str, tuple[str, ...]]] = ARRAYS,
) -> None:
    """Raise ValueError unless an array member has its dtype and shape, which `arrays` gives by its name.
    sizes: the number behind each letter of a shape."""
    dtype, shape = arrays[name]
    want = tuple(sizes[s] if s in sizes else int(s) for s in shape)
    if array.dtype != np.dtype(dtype) or array.shape != want:
        raise ValueError(f"{name} must be {dtype} {want}, got {array.dtype} {array.shape}")
