"""Set the contents of buffers before the first step, and read them back whole."""
