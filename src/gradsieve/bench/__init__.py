"""Measurements: a whole gradient exchange (`step`), and what a rank does for it by itself (`kernels`)."""
