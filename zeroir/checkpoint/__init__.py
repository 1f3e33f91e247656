"""Checkpoint files: their manifest, and how they are written, found, verified and retained.

Nothing here imports torch.
"""
