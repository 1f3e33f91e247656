"""Find, load and import what a program is compiled from."""
