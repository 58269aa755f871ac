"""Charts of a report as SVG and HTML; they need no program to be read."""
