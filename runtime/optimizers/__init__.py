"""The updates of the optimizers, in torch: one file has those of each, and ``catalogue`` lists them.

What an optimizer declares of itself for every package is in ``zeroir.ir.optimizers``.
"""
