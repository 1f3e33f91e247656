"""Checkpoints in the formats of other libraries: exported from ours, and imported to ours."""
