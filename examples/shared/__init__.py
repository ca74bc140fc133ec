"""What examples share: ranks, the Llama, its text, loss curves; torchtitan's attention."""
