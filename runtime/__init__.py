"""Execution of scheduled programs on real or virtual ranks."""
