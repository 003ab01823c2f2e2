"""The API and its pages."""
