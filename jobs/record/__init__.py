"""Recordings of bot gameplay with the truth beside them: `record` writes them, `wp2 record` calls it."""

from jobs.record.recorder import RecordError, record
from jobs.record.takes import RecordingSummary

__all__ = ["RecordError", "RecordingSummary", "record"]
