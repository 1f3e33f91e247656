"""The memory model: what a rank keeps, what is live when, and what a device must have.

* ``states`` counts the model states that a rank keeps, as the ZeRO paper does.
* ``curve`` walks a section in program order: the bytes after each op, by role, and where they are most.
* ``lifetimes`` says when buffers live by happens-before, ``most_live`` the most that any legal order of ops makes live
  at once, and ``placement`` where each buffer stands in the one block of its space.
* ``footprint`` rests on these three. It alone says what must fit, and Z301 is its verdict.
"""
