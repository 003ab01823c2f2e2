"""The one interface that starts processes: limits, output, ends, fork servers."""
