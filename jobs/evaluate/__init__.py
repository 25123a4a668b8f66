"""Measures of a world model: is it the same room, did it do what was asked, does it hold."""
