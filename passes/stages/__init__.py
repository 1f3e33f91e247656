"""The passes that implement the ZeRO stages and hybrid sharding."""
