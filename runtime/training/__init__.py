"""The training loop of `zeroir run`: steps, reports, evaluations and checkpoints."""
