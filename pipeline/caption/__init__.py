"""Captions: what to show, what to ask, what to accept."""
