"""Stable Forcing: a student learns on its own long rollouts, at a cost linear in their clips."""
