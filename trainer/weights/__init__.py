"""Files of weights: read by their header and one tensor at a time, written the same way."""
