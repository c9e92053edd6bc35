"""MetaBox's own trainers, with its own parallel environment and with ours: the weights they learn are compared."""
