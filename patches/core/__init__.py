"""The one way of putting something on a model and taking it off again: calls, slots, the ledger, clones."""
