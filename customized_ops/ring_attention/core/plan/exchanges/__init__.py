"""What each rank sends and receives: of moves of tokens, of relayed keys, between layouts."""
