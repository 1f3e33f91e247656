"""Compiler passes: each rewrites one program into another."""
