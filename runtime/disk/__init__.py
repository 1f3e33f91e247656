"""Buffers on disk: one file per rank without a name, read and written past the system's page cache."""
