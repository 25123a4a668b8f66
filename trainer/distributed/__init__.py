"""Parallelism, applied to a single-device network from outside."""
