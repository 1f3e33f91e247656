"""What a program was compiled from besides tensors, and whether it has changed since."""
