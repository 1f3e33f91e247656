"""Finds, loads and imports the source from which a program is compiled."""
