"""The page of a report: its data (``facts``), its charts (``charts``) and its HTML (``html``)."""
