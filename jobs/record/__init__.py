"""Recordings of bot gameplay with the truth beside them: `record` writes them, `wp2 record` calls it."""

from jobs.record.engine import RecordError
from jobs.record.recorder import record
from jobs.record.takes import RecordingSummary

__all__ = ["RecordError", "RecordingSummary", "record"]
