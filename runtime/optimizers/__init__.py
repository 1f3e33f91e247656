"""The updates of the optimizers, in torch: one file for each optimizer, and ``catalogue`` lists them.

The declarations of the optimizers, for all packages, are in ``zeroir.ir.optimizers``.
"""
