"""All that cukiln stores: rows, blobs, winner records. The only package that imports SQLAlchemy and obstore."""
