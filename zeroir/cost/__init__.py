"""What a step takes, predicted without torch and without running it: time on a machine, and estimates from sizes."""
