"""Ways of training a Llama over several GPUs."""
