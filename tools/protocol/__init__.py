"""An explicit-state search over the protocol of compiled programs: streams, events, boundaries and collectives."""
