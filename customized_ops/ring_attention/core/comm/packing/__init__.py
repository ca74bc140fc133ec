"""What tensors' tokens look like on their way: flat buffers of a rank's messages."""
