"""Checkpoints in the formats of other libraries: written from ours, and read into ours."""
