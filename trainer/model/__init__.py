"""The world model as single-device code; parallelism is applied from outside."""
