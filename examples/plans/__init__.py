"""Plans that are printed and drawn."""
