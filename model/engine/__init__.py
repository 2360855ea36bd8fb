"""The engine: scheduler, paged cache, retention, sampling. Knows ids and plans; opens no file and no socket."""
