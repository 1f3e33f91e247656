"""Compare a compiled program with eager PyTorch."""
