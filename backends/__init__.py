"""One file per mode. A backend only transports commands; `parallelenv.worker.host` executes them."""
