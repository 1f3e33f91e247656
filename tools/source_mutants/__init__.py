"""What ``tools.mutate_source`` does: mutants of the source, the functions that each test reaches, and verdicts."""
