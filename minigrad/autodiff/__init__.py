"""From a loss to gradients: ops record a tape, a walk goes back over it, and others look on or act on the way."""
