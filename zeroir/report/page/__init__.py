"""The report: what stands on its page (``facts``), the charts (``charts``), and the page itself (``html``)."""
