"""The passes that keep buffers in host memory or on disk."""
