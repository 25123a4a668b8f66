"""The base of every error that a user can do something about."""

from __future__ import annotations


class UserError(Exception):
    """Its message is one line: what is wrong, with which input, and what to do. The `wp2` command prints it
    and ends with exit code 1; any other exception is a fault of ours and keeps its stack trace."""


class StopRun(UserError):
    """What is wrong is wrong for every item, such as a model that answers out of its range: a stage that
    raises it ends the run, where any other error costs one item."""
