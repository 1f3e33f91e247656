"""The laws on each record and each op on its own."""
