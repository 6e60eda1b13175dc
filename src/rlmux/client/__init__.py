"""Running runs, in a folder of this machine or on a server, through one interface.

Reading order: target, in_folder, on_server, own_service, bundle, trackers.
"""
