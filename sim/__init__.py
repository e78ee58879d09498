"""Simulated worlds: batched, GIL-free MuJoCo physics with images rendered on demand. Never imports torch."""
