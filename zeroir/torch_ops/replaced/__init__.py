"""Functions of torch as zeroir computes them: alike on every device, or for sizes that depend on dims."""
