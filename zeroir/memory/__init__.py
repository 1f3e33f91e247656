"""The memory model: model states, liveness, placement, and the memory that a device must have.

* ``states`` counts the model states that a rank keeps, as the ZeRO paper does.
* ``curve`` walks a section in program order: the bytes after each op, by role, and where they are most.
* ``lifetimes`` says when buffers are live by happens-before.
* ``most_live`` finds the most bytes that any legal order of ops makes live at once, which no placement can beat.
* ``placement`` says at which offset each buffer stands in the one block of its space: the program's own plan or a new
  one, for which ``first_fit`` searches.
* ``footprint`` adds up what must fit on a device. Z301 is its verdict.
"""
