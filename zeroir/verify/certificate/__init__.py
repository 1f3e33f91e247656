"""Certificates: why the laws hold, op by op, for a small program that did not prove them itself."""
