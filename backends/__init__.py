"""One file per mode. A backend transports commands; their meaning is in `parallelenv.worker.host`."""
