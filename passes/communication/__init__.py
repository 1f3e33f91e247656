"""The passes that merge, move and limit collectives."""
