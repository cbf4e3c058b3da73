"""Drawings of a timeline: text, PNG, SVG, trace, HTML page."""
