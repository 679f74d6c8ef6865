"""Device side: packs a plan, runs the one jitted step on the donated state, hands tokens back."""
