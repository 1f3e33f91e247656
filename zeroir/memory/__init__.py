"""The memory model: model states, liveness, placement, and the memory that a device must have.

* ``states`` counts the model states that a rank keeps, as the ZeRO paper does.
* ``curve`` walks a section in program order: the bytes after each op, by role, and their maximum.
* ``lifetimes`` determines when buffers are live by happens-before.
* ``most_live`` finds the most bytes that any legal order of ops makes live at once, a lower bound for placements.
* ``placement`` assigns each buffer an offset in the one block of its space: by the program's own plan or a new
  one, for which ``first_fit`` searches.
* ``footprint`` adds up what must fit on a device. Z301 is based on it.
"""
