"""Functions that several passes share."""
