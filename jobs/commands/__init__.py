"""The commands of `wp2`, by what they are for. Each module adds its own to the app of `base`."""
