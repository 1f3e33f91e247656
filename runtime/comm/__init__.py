"""Backends that carry out collectives: one module each, behind one Protocol."""
