"""Watch a run while it goes on, or after its end: its page on localhost, or its state in the terminal."""
