"""What each rank sends and receives: of moves of tokens, of keys step by step, between layouts."""
