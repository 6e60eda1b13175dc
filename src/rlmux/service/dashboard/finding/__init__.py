"""How runs are found again and compared: labels, notes, one search over all lanes, figures side by side.

Modules of their own, although one module imports them: `search` is the rule of matching, without requests and indexes.

Reading order: labels, search, finding_handlers.
"""
