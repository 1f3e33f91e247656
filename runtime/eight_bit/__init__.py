"""Optimizer states of 8 bits in torch: rounding, updates, states of checkpoints, and the plain reference.

The definition of codes and scales is in ``zeroir/ir/eight_bit_states.py``.
"""
