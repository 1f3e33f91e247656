"""The data of training: which samples come in which order, and how far a run has come in them."""
