"""What defences hold back, what they cost a model, and whether epsilon holds."""
