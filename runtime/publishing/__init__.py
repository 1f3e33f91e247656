"""New weights go from the ranks that train to processes that infer: ``Engine.publish`` and ``Receiver``."""
