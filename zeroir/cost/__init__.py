"""The costs of a step without running it and without torch: its time on a machine, and estimates from sizes."""
