"""The lanes of a service: runs that it keeps going, and what is submitted to them.

Reading order: controllers, submissions, submission_ledger, bundles, devices, authorization, data_dir.
"""
