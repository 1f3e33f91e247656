"""Modules whose code runs as it is within a program, because it cannot be traced."""
