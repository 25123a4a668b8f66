"""Codecs between pixels and latents, and text encoders; base.py says what a codec is."""
