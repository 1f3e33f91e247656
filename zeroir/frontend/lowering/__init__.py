"""Cuts a joint graph into units and segments, and lowers them to a logical program."""
