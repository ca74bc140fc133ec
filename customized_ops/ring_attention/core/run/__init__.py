"""Runs a rank's part of a plan (``executor``), or has TransformerEngine attend (``te_cp``)."""
