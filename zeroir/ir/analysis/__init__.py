"""Facts that follow from a program: effects, order, copies, traffic."""
