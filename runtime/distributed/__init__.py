"""Ranks join a job, tell each other that they live, and notice when they do different things."""
