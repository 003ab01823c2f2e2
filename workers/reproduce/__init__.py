"""One candidate as a folder that builds and checks it anywhere."""
