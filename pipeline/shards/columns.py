"""Column types of the annotation tars, for readers that would otherwise guess them from the first rows.

Hugging Face `datasets` takes types from the first five samples: where none of those has an event or an
unknown action, the empty lists become list<null> and the first filled one fails (seen with datasets 5.2).
"""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from schemas.sample import ARRAYS, FAMILIES, Annotation

_SCALARS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def annotation_columns() -> pa.Schema:
    """A column a member of the annotations family, and the two that `datasets` adds.

    Use: `load_dataset("webdataset", features=Features.from_arrow_schema(annotation_columns()), ...)`.
    """
    columns = {"json": _type(Annotation)}
    for suffix in FAMILIES["annotations"]:
        if suffix in ARRAYS:
            dtype, shape = ARRAYS[suffix]
            columns[suffix] = pa.type_for_alias(dtype)
            for _ in shape:
                columns[suffix] = pa.list_(columns[suffix])
    return pa.schema({**columns, "__key__": pa.string(), "__url__": pa.string()})


def _type(annotation: Any) -> pa.DataType:
    """Arrow type of a field of a record: a scalar, an enumeration, a record, or a tuple of one of these."""
    if typing.get_origin(annotation) is tuple:
        return pa.list_(_type(typing.get_args(annotation)[0]))
    if issubclass(annotation, BaseModel):
        return pa.struct([(n, _type(f.annotation)) for n, f in annotation.model_fields.items()])
    return pa.string() if issubclass(annotation, StrEnum) else _SCALARS[annotation]
