"""What the example scripts share. Nothing here trains: an example's own file shows the whole training loop."""
