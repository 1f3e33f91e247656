"""DeepSpeed's configuration file, translated into zeroir's options.

``model`` names every key of DeepSpeed 0.19.6 and its treatment: it is honoured, one line says why it has no meaning
here, or one sentence refuses it. What decides the results of training has DeepSpeed's default where a key is absent;
what decides only speed and memory has zeroir's.
"""

from __future__ import annotations

from zeroir.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
