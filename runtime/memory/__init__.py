"""Allocate the buffers of a rank, and measure what operators take beside them."""
