"""How segments are carried out on a CPU, and what that takes beside their inputs and destinations."""
