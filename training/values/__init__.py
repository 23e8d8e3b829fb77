"""Named values on the shards of an exchange: keys and their encoding, reducers, the client, and the owner's side."""
