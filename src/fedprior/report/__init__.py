"""One run, or several beside each other, as one offline page."""
