"""From values to what is shown: flat rows of plain values, and lines of text. Pure functions.

Names of row fields carry their units. The command line prints rows as JSON, or as tables.
"""
