"""The room of ids and tensors: protocol, engine, decoder, families, checkpoints, worker. Never imports `app`."""
