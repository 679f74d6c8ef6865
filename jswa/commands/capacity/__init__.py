"""`jswa capacity`: whether a model fits, and how many requests at once."""
