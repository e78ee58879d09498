"""Demonstrations: recording, reading, and the batches that cloning learns from."""
