"""What cukiln remembers: rows, blobs, winner records. The only package that knows SQLAlchemy and obstore."""
