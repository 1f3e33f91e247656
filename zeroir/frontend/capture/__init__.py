"""Traces a model's forward and backward into a joint graph."""
