"""The page of a run: what its directory holds, read, thinned out, drawn and rendered as one HTML file."""
