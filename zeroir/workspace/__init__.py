"""The memory of ops in addition to their buffers while they run, on a CPU with eager kernels.

* ``eager_plan`` plans how a segment runs node by node; the eager kernels follow it.
* ``segments`` computes what that plan needs at once, and declares it in the segments of a program.
* ``scratch`` has the formulas for the temporary tensors of PyTorch's operators.
  ``scratch.allowance`` bounds the memory of libraries.
* ``promotion`` has PyTorch's rules for the dtype that operands are converted to.
* ``op_scratch`` computes what each op of a program needs: the workspace that its segment declares, or its own.
"""
