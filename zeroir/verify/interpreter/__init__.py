"""The abstract interpreter: prove what every element of every buffer holds."""
