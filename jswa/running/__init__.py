"""What an engine does step by step: it runs steps until it pauses or sleeps, and takes new weights and adapters."""
