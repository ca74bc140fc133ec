"""The groups that carry messages to peers, and NCCL, which passes those between GPUs."""
