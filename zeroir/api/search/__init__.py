"""Searches of options for the fastest step or the smallest memory."""
