"""The kernels of segments: one module per backend, behind one Protocol."""
