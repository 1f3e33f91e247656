"""The laws on what may run at the same time, and on memory that is live at once."""
