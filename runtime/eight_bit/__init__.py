"""Optimizer states of 8 bits in torch: rounding, updates, states in checkpoints, and the plain reference.

Codes and scales are defined in ``zeroir/ir/eight_bit_states.py``.
"""
