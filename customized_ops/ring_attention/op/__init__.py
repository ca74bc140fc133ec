"""How an attention call becomes a plan and a kernel, with and without a graph."""
