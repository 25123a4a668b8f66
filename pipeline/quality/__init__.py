"""Quality of clips: visual axes, smoothness, thresholds, policy."""
