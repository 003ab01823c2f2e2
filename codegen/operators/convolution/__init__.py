"""What the convolutions share, forward and their gradients. No folder of an operator: it has no kernel.cuh."""
