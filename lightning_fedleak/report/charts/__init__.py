"""The charts of a report, as SVG and HTML that a browser shows without JavaScript."""
