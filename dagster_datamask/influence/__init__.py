"""Model-aware selection: rollouts of a language model, influence models and group selection (Group-MATES, MATES)."""
