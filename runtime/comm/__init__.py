"""Backends for collectives: one module each, behind one Protocol."""
