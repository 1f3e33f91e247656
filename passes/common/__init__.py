"""What passes share."""
