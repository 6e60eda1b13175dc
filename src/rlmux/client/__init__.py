"""Runs that go on elsewhere: in a folder of this machine, or on a server; the same questions, the same answers.

Reading order: target, in_folder, on_server, bundle, trackers.
"""
