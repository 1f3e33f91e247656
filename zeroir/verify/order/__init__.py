"""The laws on ops that may run at the same time, and on memory that is live at once."""
