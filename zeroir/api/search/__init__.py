"""Search options for the fastest step or the smallest memory."""
