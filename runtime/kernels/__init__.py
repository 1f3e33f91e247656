"""What runs a segment: one module per kernel backend, behind one Protocol."""
