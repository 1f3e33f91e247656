"""Issue the ops of sections on streams, and execute them on real or virtual ranks."""
