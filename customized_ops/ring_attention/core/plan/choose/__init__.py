"""The plan of a request: by construction for documents (``document_plan``), else the fastest of
candidates (``search``); both by predicted times (``rates``)."""
