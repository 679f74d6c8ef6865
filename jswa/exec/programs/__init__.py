"""The compiled programs: the step with its parts, and the small ones beside it that move pages and rows."""
