"""Drafts as the scheduler sees them: how many a step runs, and in which texts they are looked up."""
