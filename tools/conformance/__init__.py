"""The conformance suite: torch's own samples of operators and modules, compiled and compared with plain autograd."""
