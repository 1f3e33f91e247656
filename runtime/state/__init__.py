"""Sets the contents of buffers before the first step, and reads them back unsharded."""
