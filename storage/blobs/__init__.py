"""Blobs by digest, in a folder or an object store."""
