"""Other engines, each in its own process: `server` runs there, `client` and `contender` here."""
