"""Thin entry points: load a config, call one function."""
