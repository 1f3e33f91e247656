"""The optimizers: one file declares each, and ``catalogue`` lists them."""
