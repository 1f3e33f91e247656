"""Translation of DeepSpeed's configuration file to zeroir's options.

``model`` declares every key of DeepSpeed 0.19.6 with its treatment: it is honoured, ignored with a note that says why
it has no meaning here, or refused with an error. If a key is absent, what affects the results of training gets
DeepSpeed's default, and what affects only speed and memory zeroir's.
"""

from __future__ import annotations

from zeroir.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
