"""Buffers on disk: one unnamed file per rank, read and written without the system's page cache."""
