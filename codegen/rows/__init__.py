"""What operators share that compute each row of a matrix from all of it: softmax and the norms."""
