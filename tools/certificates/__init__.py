"""A small program that checks certificates; it imports nothing of zeroir."""
