"""From a graph and its strategies to a plan: policies, costs, limits, the search, the table."""
