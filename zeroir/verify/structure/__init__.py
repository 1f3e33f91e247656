"""The laws on each record and each op by itself."""
