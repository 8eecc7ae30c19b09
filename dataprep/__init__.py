"""What only stage 1 needs: reading files, shapes of rows, rules between rows. Takes values, never the stage's configuration."""
