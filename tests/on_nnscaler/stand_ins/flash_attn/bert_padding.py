"""As :mod:`flash_attn`: names alone."""

index_first_axis = pad_input = unpad_input = None
