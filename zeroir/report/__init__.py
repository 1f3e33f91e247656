"""Reports on programs for people and machines. Never imports torch."""
