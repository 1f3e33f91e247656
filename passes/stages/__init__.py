"""The passes that make the ZeRO stages and hybrid sharding."""
