"""What only the kernel "flash4" needs."""
