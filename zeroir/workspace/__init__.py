"""The memory of ops beyond their buffers while they run, on a CPU with eager kernels.

* ``eager_plan`` says how a segment is carried out node by node; the eager kernels follow it.
* ``segments`` counts what that plan holds at once, and lets the segments of a program declare it.
* ``scratch`` has the formulas for the temporary tensors of PyTorch's operators.
  ``scratch.allowance`` bounds what libraries take.
* ``promotion`` has PyTorch's rules for the dtype that operands are converted to.
* ``op_scratch`` says what each op of a program takes: the workspace that its segment declares, or its own.
"""
