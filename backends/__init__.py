"""One file a mode. A backend transports; what a command means is written in `host`."""
