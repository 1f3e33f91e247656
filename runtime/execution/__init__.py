"""Issues the ops of sections on streams, and executes them on real or virtual ranks."""
