"""Checkpoints as files: their manifest, how they are written, found, checked and kept. Nothing here needs torch."""
