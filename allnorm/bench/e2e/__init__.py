"""What `allnorm e2e` runs inside the ranks: a transformer, its ways to reduce, clock and checks."""
