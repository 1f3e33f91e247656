"""Saving the state of an engine to checkpoints, and loading it from them."""
