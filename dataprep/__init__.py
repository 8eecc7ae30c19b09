"""What only stage 1 needs. Its functions take values, never a stage's configuration."""
