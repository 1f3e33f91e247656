"""The passes that decide which values are saved or recomputed, and where buffers are placed in memory."""
