"""Folders from which a federation over Flower is started safely: certificates, keys, a proxy, services, checks."""
