"""The passes that decide what is saved, computed again, and where it stands in memory."""
