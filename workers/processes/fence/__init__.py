"""What a child may touch: namespaces, users, Landlock, sockets."""
