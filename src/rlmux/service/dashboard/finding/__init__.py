"""How runs are found again and compared: labels, notes, one search over all lanes, figures side by side.

Reading order: labels, finding_handlers.
"""
