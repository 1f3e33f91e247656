"""The device of a rank: streams, events, graphs, memory and random numbers, behind one interface."""
