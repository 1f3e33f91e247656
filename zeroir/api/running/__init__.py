"""Run a compiled program on all ranks of a job."""
