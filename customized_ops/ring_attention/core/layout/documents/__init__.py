"""Documents on ranks: whole, split over a few ranks, by hosts, or prefix trees by subtrees."""
