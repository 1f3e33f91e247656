"""The data of training: the order of samples, and the position of a run in it."""
