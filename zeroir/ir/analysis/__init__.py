"""Analyses of a program: effects, order, copies, traffic."""
