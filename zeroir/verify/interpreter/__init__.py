"""The abstract interpreter, which proves the value of every element of every buffer."""
