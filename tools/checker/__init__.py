"""A second checker of compiled programs, written from ``docs/ir.md``; it imports nothing of zeroir."""
