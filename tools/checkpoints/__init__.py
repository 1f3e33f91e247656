"""Shared by the proofs of checkpoints: a job that saves, a recorder of file operations, and a disk that forgets."""
