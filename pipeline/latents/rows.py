"""Arrays written row by row, so that a clip's length costs disk and no memory."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

DTYPE = np.dtype("<f2")
"""Latents and embeddings are stored as float16: of values within about 10 it keeps 3 more bits than bfloat16,
and every reader of .npy knows it."""


class RowWriter:
    """A .npy file of float16 [*lead, *row], whose rows are appended. Closing it before it is full raises."""

    def __init__(self, path: Path, lead: tuple[int, ...], row: tuple[int, ...]) -> None:
        self._path, self._row = path, row
        self._rows, self._written = math.prod(lead), 0
        self._file = path.open("wb")
        header = {"descr": DTYPE.str, "fortran_order": False, "shape": (*lead, *row)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: npt.NDArray[np.float32]) -> None:
        """values: float32 [n, *row]. Raises ValueError on another shape, or values beyond float16."""
        if values.shape[1:] != self._row:
            raise ValueError(f"{self._path.name} has rows of {self._row}, not {values.shape[1:]}")
        self._file.write(half(values, self._path.name).tobytes())
        self._written += len(values)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._written != self._rows:
            raise ValueError(f"{self._path.name} got {self._written} rows of {self._rows}")


def half(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float16]:
    """As float16. Raises ValueError where a value is not finite, or beyond 65504."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= float(np.finfo(DTYPE).max):
        raise ValueError(f"{name} would hold {largest}, which float16 does not: check the weights")
    return np.ascontiguousarray(values, DTYPE)


def write_array(path: Path, values: npt.NDArray[np.float32]) -> None:
    """One .npy file of float16. Raises ValueError as `half`."""
    np.save(path, half(values, path.name), allow_pickle=False)
