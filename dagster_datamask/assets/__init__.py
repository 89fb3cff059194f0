"""Software-defined assets: each wraps one stage. What a stage computes is in `stages`; how it is wired, here."""
