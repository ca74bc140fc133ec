"""Who computes what: slices with teams (``work``), made even (``even_work``, ``document_work``)."""
