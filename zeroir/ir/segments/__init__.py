"""Segments, and the torch operators that they may call."""
