"""Blocks that occur repeatedly in a model: calls that are equal are traced once."""
