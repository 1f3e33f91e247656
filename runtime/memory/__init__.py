"""Allocates the buffers of a rank, and measures the workspaces of operators."""
