"""The conformance suite: torch's own samples of its operators and modules, compiled and compared with plain autograd."""
