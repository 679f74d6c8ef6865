"""How far a prefix cache could go: a bound of any policy, and a policy that knows the future."""
