"""Published bugs of sharded training, each as a valid program and one change that repeats the mistake."""
