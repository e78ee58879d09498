"""LIBERO and LIBERO-PRO: the tasks of an installed `libero` package in worlds of our own."""
