"""Shards to batches: the plan of the order, the reader that streams it, the batch."""
