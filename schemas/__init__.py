"""Records that travel between stages, and the exact arithmetic on them. No I/O, no tensors, no media."""

SCHEMA_VERSION = 1
"""Version of every record and table of this package; stored in every artefact and checked on read."""
